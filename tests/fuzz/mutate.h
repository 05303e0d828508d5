// Damaged input for the short fuzz tests that stand beside each parser: *_fuzz_test.cc. The same seed gives the same inputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>

namespace mbridge::fuzz {

// Inputs to try: `short_form` in CI (a second or two), a hundred times as many with MB_FULL=1.
inline int Rounds(int short_form) {
  const char* full = std::getenv("MB_FULL");
  return full != nullptr && std::string(full) == "1" ? short_form * 100 : short_form;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // `text` with one to four changes: bits, bytes, numbers at the edges of their types, pieces cut out, doubled or moved.
  std::string operator()(std::string text) {
    for (uint64_t changes = 1 + Below(4); changes > 0; --changes) Change(&text);
    return text;
  }
  uint64_t Below(uint64_t limit) { return random_() % limit; }

 private:
  void Change(std::string* text) {
    if (text->empty()) {
      text->push_back(static_cast<char>(random_()));
      return;
    }
    const size_t at = Below(text->size());
    const size_t length = 1 + Below(std::min<size_t>(16, text->size() - at));
    switch (Below(7)) {
      case 0: (*text)[at] = static_cast<char>((*text)[at] ^ (1 << Below(8))); return;
      case 1: (*text)[at] = static_cast<char>(random_()); return;
      case 2: text->erase(at, length); return;
      case 3: text->insert(at, text->substr(Below(text->size()), length)); return;
      case 4: text->resize(at); return;
      case 5: text->insert(at, 1, "\0\xff\"\\{}[],:='~+. \n"[Below(18)]); return;
      default: WriteNumber(text, at);
    }
  }

  // Little-endian, 4 or 8 bytes, as counts, lengths and offsets are stored.
  void WriteNumber(std::string* text, size_t at) {
    constexpr int64_t kEdges[] = {0, 1, -1, INT32_MAX, INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN, int64_t{1} << 40};
    const int64_t number = kEdges[Below(std::size(kEdges))];
    const size_t width = Below(2) == 0 ? 4 : 8;
    for (size_t i = 0; i < width && at + i < text->size(); ++i) {
      (*text)[at + i] = static_cast<char>(static_cast<uint64_t>(number) >> (8 * i));
    }
  }

  std::mt19937_64 random_;
};

}  // namespace mbridge::fuzz
