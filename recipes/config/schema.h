// The keys of config.proto by reflection: find, suggest, read, write, list. Thread-safe after the first use.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recipes/config/value.h"

namespace google::protobuf {
class FieldDescriptor;
}
namespace mbridge::v1 {
class ConfigContainer;
class KeyInfo;
}  // namespace mbridge::v1

namespace mbridge::recipes {

struct Key {
  std::string path;                                             // "train.train_iters"
  std::string group;                                            // "train"
  std::string name;                                             // "train_iters"
  std::vector<const google::protobuf::FieldDescriptor*> chain;  // From ConfigContainer to the field.
  const v1::KeyInfo* info = nullptr;

  // Whether setting the key changes something in this version (no `effect` in the schema).
  bool Works() const;
  // "int", "float", "bool", "text", "list of int", "blend", "map".
  std::string TypeName() const;
  // "> 0", "0 .. 1", "constant | linear"; empty when everything of the type is allowed.
  std::string RangeText() const;
  std::string Help() const;
  // Bridge's default; null when it has none.
  Value Default() const;
};

class Schema {
 public:
  static const Schema& Get();

  // In the order of config.proto.
  const std::vector<Key>& keys() const { return keys_; }
  const Key* Find(std::string_view path) const;
  bool IsGroup(std::string_view name) const;
  // At most `limit` keys whose path or last part is spelled like `path`, the nearest first.
  std::vector<std::string> Nearest(const std::string& path, int limit = 3) const;

 private:
  Schema();
  std::vector<Key> keys_;
  std::unordered_map<std::string, size_t> by_path_;
};

// Absent scalar or empty list: null.
Value ReadKey(const v1::ConfigContainer& config, const Key& key);

// Sets or (null) clears a key; words that mean the same are brought to one form (torch.bfloat16 -> bf16). When type,
// range or word is wrong, nothing is written and the result says what is wrong, what is allowed and what to write.
std::optional<std::string> WriteKey(const Key& key, const Value& value, v1::ConfigContainer* config);

// Number of single-character edits between two texts.
int EditDistance(std::string_view a, std::string_view b);
// The word of `words` nearest to `word`: few edits away, else one that begins with it or contains it; empty when none is near.
std::string NearestWord(const std::string& word, const std::vector<std::string>& words);
// "; did you mean X?", or empty when none is near.
std::string DidYouMean(const std::string& word, const std::vector<std::string>& words);

// What `mbctl recipe keys PATTERN` shows of a key.
struct KeyDescription {
  std::string key, type, default_value, range, help, effect, mlm_flag;
};
// Keys whose path or help contains `pattern` (case-insensitive; empty = all). `effect` is "", "planned" or the reason why
// the key does nothing here.
std::vector<KeyDescription> DescribeKeys(const std::string& pattern);

}  // namespace mbridge::recipes
