// Tokens by sequence: what a GPT dataset draws its samples from.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace mbridge {

class TokenSource {
 public:
  virtual ~TokenSource() = default;
  int64_t sequences() const { return sequences_; }
  // Tokens of a sequence, i in [0, sequences()).
  int32_t length(int64_t i) const {
    int32_t value;  // The array of an .idx file is not aligned.
    std::memcpy(&value, lengths_ + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  }
  // Copies tokens [offset, offset + count) of a sequence, a range inside it. Ids that do not fit int32 come out as -1.
  virtual void Read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const = 0;
  // For messages: the path prefix, or "mock data".
  virtual const std::string& name() const = 0;

 protected:
  void SetLengths(const void* lengths, int64_t sequences) {
    lengths_ = static_cast<const unsigned char*>(lengths);
    sequences_ = sequences;
  }

 private:
  const unsigned char* lengths_ = nullptr;
  int64_t sequences_ = 0;
};

}  // namespace mbridge
