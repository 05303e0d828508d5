#include "server/nodes/names.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <mutex>
#include <random>

namespace mbridge::server {
namespace {

constexpr char kBase32[] = "0123456789abcdefghjkmnpqrstvwxyz";
constexpr size_t kMaxRunName = 63;
constexpr std::array kAdjectives = {"amber",  "bold",  "brave", "bright", "calm",  "clear", "cool",   "deep",   "eager",
                                    "early",  "fair",  "fleet", "fond",   "free",  "fresh", "gentle", "glad",   "grand",
                                    "green",  "keen",  "kind",  "lively", "lucky", "mild",  "neat",   "noble",  "plain",
                                    "proud",  "quick", "quiet", "rapid",  "ready", "sharp", "silent", "smooth", "solid",
                                    "steady", "still", "sunny", "swift",  "tidy",  "true",  "warm",   "wise"};
constexpr std::array kAnimals = {"badger", "bear",    "beaver", "bison",  "crane",  "curlew", "deer",  "dove",  "eagle",
                                 "falcon", "finch",   "fox",    "gecko",  "goose",  "hare",   "hawk",  "heron", "ibex",
                                 "jay",    "kestrel", "lark",   "lynx",   "marten", "mole",   "moose", "newt",  "otter",
                                 "owl",    "panda",   "plover", "puffin", "quail",  "raven",  "robin", "seal",  "stork",
                                 "swan",   "tern",    "trout",  "vole",   "whale",  "wolf",   "wren",  "yak"};

uint64_t Random() {
  static std::mutex mutex;
  static std::mt19937_64 generator = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  std::lock_guard lock(mutex);
  return generator();
}

std::string Base32(uint64_t value, int characters) {
  std::string text(characters, '0');
  for (int i = characters - 1; i >= 0; --i, value >>= 5) text[i] = kBase32[value & 31];
  return text;
}

}  // namespace

std::string NewJobId(std::chrono::system_clock::time_point now) {
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  return "j-" + Base32(static_cast<uint64_t>(milliseconds), 8) + Base32(Random(), 4);
}

std::string NewRunName() {
  return fmt::format("{}-{}-{}", kAdjectives[Random() % kAdjectives.size()], kAnimals[Random() % kAnimals.size()],
                     Base32(Random(), 4));
}

std::string NewId(const std::string& prefix) { return prefix + Base32(Random(), 8); }

std::string WhyNotARunName(const std::string& name) {
  if (name.empty() || name.size() > kMaxRunName) {
    return fmt::format("has {} characters; 1 to {} are allowed", name.size(), kMaxRunName);
  }
  if (!std::isalnum(static_cast<unsigned char>(name[0]))) return fmt::format("'{}' must begin with a letter or a digit", name);
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.') continue;
    return fmt::format("'{}' holds a character that is not a letter, digit, '-', '_' or '.'", name);
  }
  return {};
}

}  // namespace mbridge::server
