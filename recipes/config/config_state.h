// A configuration being resolved: values, where each comes from, what was changed automatically, what is wrong.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/recipe.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/value.h"

namespace mbridge::recipes {

// A later level wins over an earlier one. Recipe files of a chain have kRecipe, kRecipe + 1, ...
enum Level : int { kUnset = -1, kDefault = 0, kRecipe = 1, kFile = 50, kOverride = 60 };

struct Setting {
  v1::Origin origin = v1::ORIGIN_UNSPECIFIED;
  std::string source;
  int level = kUnset;
  Value value;  // As it was set; the final value stands in the configuration.
};

class ConfigState {
 public:
  v1::ConfigContainer config;
  std::map<std::string, Setting> settings;
  std::vector<v1::AutomaticChange> changes;
  std::vector<std::string> warnings;
  std::vector<FieldViolation> violations;
  v1::Reason reason = v1::REASON_INVALID_CONFIG;  // Of the violations.

  // Records a wrong type or value as a violation.
  void Set(const std::string& key, const Value& value, v1::Origin origin, const std::string& source, int level);
  // A value that follows from others; replaces whatever stands there without a record.
  void Derive(const std::string& key, const Value& value, const std::string& from);
  // As Derive, but listed as an automatic change when another value had been set at `from_level` or later.
  void Change(const std::string& key, const Value& value, const std::string& why, int from_level = kRecipe);
  void RecordChange(const std::string& key, const Value& old_value, const Value& new_value, const std::string& why);
  // A violation; `description` is the rest of a sentence that starts with the key.
  void Fail(const std::string& key, const std::string& description) { violations.push_back({key, description}); }

  // Value now in the configuration; null when absent.
  Value Get(const std::string& key) const;
  bool Has(const std::string& key) const { return !Get(key).is_null(); }
  // kUnset when nobody set the key.
  int LevelOf(const std::string& key) const;
  bool SetByUser(const std::string& key) const { return LevelOf(key) >= kFile; }
  std::string Text(const std::string& key) const { return FormatValue(Get(key)); }

  // Two keys of one meaning: the one set at the later level gives the value to both. Set differently at the same level
  // by the user: a violation; by recipes: `first` wins.
  void Unify(const std::string& first, const std::string& second, const std::string& why);
};

}  // namespace mbridge::recipes
