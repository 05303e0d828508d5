// key = value as read from a recipe, a --config file or an override, before it is checked against the schema.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "recipes/config/value.h"

namespace mbridge::recipes {

struct Assignment {
  std::string key;  // Dotted path as written.
  Value value;
  std::string source;  // "llama3_8b_pretrain_config.yaml:12", "override 3".
};

// A key that Megatron-Bridge's recipe of the same name sets otherwise.
struct BridgeDifference {
  std::string key, bridge, why;  // Empty why: it does not, although a base of the recipe does.
};

// A recipe or --config file: a few words about itself and groups of keys.
struct ConfigFile {
  std::string name;
  std::vector<std::string> aliases;
  std::string description;
  std::string base;                           // Recipe to start from; empty = schema defaults.
  std::string not_trainable;                  // Why the recipe can't be trained yet; empty = it can.
  bool is_abstract = false;                   // A base that is no recipe by itself.
  bool nested_model_keys = false;             // Overrides may say model.transformer.X for model.X.
  std::vector<BridgeDifference> differences;  // Of the file alone, without its bases.
  std::vector<Assignment> assignments;
};

// Reads YAML. INVALID_ARGUMENT names `file`, line and column. Whether the keys exist is not checked here.
absl::StatusOr<ConfigFile> ParseConfigFile(const std::string& file, const std::string& yaml);

// Two configuration files as one: keys of `upper` win, whatever way they are written. INVALID_ARGUMENT as ParseConfigFile.
absl::StatusOr<std::string> MergeConfigFiles(const std::string& lower, const std::string& upper);

// Splits `key=value`, `+key=value` or `++key=value`. INVALID_ARGUMENT says what is wrong with the text: no `=`, blanks,
// an empty key or value, `~key`, a value outside the grammar.
absl::StatusOr<Assignment> ParseOverride(const std::string& text);

}  // namespace mbridge::recipes
