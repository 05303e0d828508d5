#include "recipes/config/assignment.h"

namespace mbridge::recipes {

absl::StatusOr<Assignment> ParseOverride(const std::string& text) {
  const std::string shown = text.size() > 200 ? text.substr(0, 200) + "..." : text;
  const auto wrong = [&shown](const std::string& what) {
    return absl::InvalidArgumentError("override '" + shown + "': " + what);
  };
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) return wrong("is empty; write key.path=value");
  if (text[0] == '~') return wrong("keys can't be deleted; write " + text.substr(1, text.find('=') - 1) + "=null to unset a key");
  if (text.rfind("--", 0) == 0) {
    return wrong("looks like a Megatron-LM flag; `mbctl translate` turns a Megatron-LM command line into a recipe and overrides");
  }
  const size_t equals = text.find('=');
  if (equals == std::string::npos) return wrong("has no =; write key.path=value");
  std::string key = text.substr(0, equals);
  for (int plus = 0; plus < 2 && !key.empty() && key[0] == '+'; ++plus) key.erase(0, 1);
  if (key.empty()) return wrong("has no key before =");
  if (key.find_first_of(" \t\r\n") != std::string::npos) return wrong("has blanks in or around its key; write key.path=value");
  absl::StatusOr<Value> value = ParseValue(text.substr(equals + 1));
  if (!value.ok()) return wrong(std::string(value.status().message()));
  return Assignment{key, *std::move(value), "override"};
}

}  // namespace mbridge::recipes
