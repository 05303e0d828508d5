#include <yaml-cpp/yaml.h>

#include <set>

#include "proto/rpc/status_details.h"
#include "recipes/config/assignment.h"
#include "recipes/config/resolve.h"
#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

class Reader {
 public:
  Reader(std::string file, ConfigFile* out) : file_(std::move(file)), out_(out) {}

  absl::Status Read(const YAML::Node& root) {
    if (root.IsNull()) return absl::OkStatus();
    if (!root.IsMap()) return Wrong(root, "expected `group:` lines");
    return ReadEntries(root, [this](const std::string& name, const YAML::Node& node) { return ReadTopLevel(name, node); });
  }

 private:
  template <typename Visit> absl::Status ReadEntries(const YAML::Node& map, const Visit& visit) {
    std::set<std::string> seen;
    for (const auto& entry : map) {
      if (!entry.first.IsScalar()) return Wrong(entry.first, "a key must be a plain word");
      const std::string name = entry.first.Scalar();
      if (!seen.insert(name).second) return Wrong(entry.first, "the key " + name + " stands here twice");
      line_ = entry.first.Mark().line + 1;
      if (absl::Status status = visit(name, entry.second); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ReadTopLevel(const std::string& name, const YAML::Node& node) {
    if (name == "name") return ReadText(node, &out_->name);
    if (name == "base") return ReadText(node, &out_->base);
    if (name == "description") return ReadText(node, &out_->description);
    if (name == "not_trainable") return ReadText(node, &out_->not_trainable);
    if (name == "abstract") return ReadFlag(node, &out_->is_abstract);
    if (name == "nested_model_keys") return ReadFlag(node, &out_->nested_model_keys);
    if (name == "differs_from_bridge") {
      if (!node.IsMap()) return Wrong(node, "differs_from_bridge is a map of keys");
      return ReadEntries(node, [this](const std::string& key, const YAML::Node& entry) { return ReadDifference(key, entry); });
    }
    if (name == "aliases") {
      if (!node.IsSequence()) return Wrong(node, "aliases is a list");
      for (const auto& alias : node) out_->aliases.push_back(alias.as<std::string>());
      return absl::OkStatus();
    }
    return ReadGroup(name, node);
  }

  // KEY: {bridge: VALUE, why: TEXT}; KEY: {bridge: VALUE} for a key without effect here, whose help says why; KEY: null takes
  // back what a base says.
  absl::Status ReadDifference(const std::string& key, const YAML::Node& node) {
    BridgeDifference difference{key, "", ""};
    if (!node.IsNull()) {
      if (!node.IsMap() || !node["bridge"] || node.size() > 2) return Wrong(node, "expected {bridge: VALUE, why: TEXT}");
      absl::StatusOr<Value> value = ToValue(node["bridge"], 0);
      if (!value.ok()) return value.status();
      difference.bridge = FormatValue(*value);
      const Key* known = Schema::Get().Find(key);
      difference.why = node["why"] ? node["why"].as<std::string>() : known != nullptr ? known->info->instead() : "";
      if (difference.why.empty()) return Wrong(node, "says not why");
    }
    out_->differences.push_back(std::move(difference));
    return absl::OkStatus();
  }

  // A map below a group, and below offline_packing_specs, is a group again; below env_vars it is the value.
  absl::Status ReadGroup(const std::string& path, const YAML::Node& node) {
    const bool group = node.IsMap() && Schema::Get().Find(path) == nullptr;
    if (!group) {
      absl::StatusOr<Value> value = ToValue(node, 0);
      if (!value.ok()) return value.status();
      out_->assignments.push_back({path, *std::move(value), file_ + ":" + std::to_string(line_)});
      return absl::OkStatus();
    }
    return ReadEntries(node,
                       [&](const std::string& name, const YAML::Node& child) { return ReadGroup(path + "." + name, child); });
  }

  absl::StatusOr<Value> ToValue(const YAML::Node& node, int depth) {
    if (depth > 16) return Wrong(node, "nested deeper than 16 levels");
    if (node.IsNull()) return Value::Null();
    if (node.IsScalar()) {
      // yaml-cpp marks quoted scalars with the tag "!".
      return node.Tag() == "!" ? Value::String(node.Scalar()) : ParseWord(node.Scalar());
    }
    Value value;
    if (node.IsSequence()) {
      value.kind = Value::Kind::kList;
      for (const auto& child : node) {
        absl::StatusOr<Value> item = ToValue(child, depth + 1);
        if (!item.ok()) return item;
        value.list.push_back(*std::move(item));
      }
      return value;
    }
    value.kind = Value::Kind::kMap;
    for (const auto& entry : node) {
      absl::StatusOr<Value> item = ToValue(entry.second, depth + 1);
      if (!item.ok()) return item;
      value.map.push_back({entry.first.as<std::string>(), *std::move(item)});
    }
    return value;
  }

  absl::Status ReadText(const YAML::Node& node, std::string* text) {
    if (!node.IsScalar()) return Wrong(node, "expected a text");
    *text = node.Scalar();
    return absl::OkStatus();
  }

  absl::Status ReadFlag(const YAML::Node& node, bool* flag) {
    if (!node.IsScalar() || ParseWord(node.Scalar()).kind != Value::Kind::kBool) return Wrong(node, "expected true or false");
    *flag = ParseWord(node.Scalar()).boolean;
    return absl::OkStatus();
  }

  absl::Status Wrong(const YAML::Node& node, const std::string& what) const {
    return absl::InvalidArgumentError(file_ + ":" + std::to_string(node.Mark().line + 1) + ":" +
                                      std::to_string(node.Mark().column + 1) + ": " + what);
  }

  std::string file_;
  ConfigFile* out_;
  int line_ = 0;
};

// Takes the keys of `upper` out of `map`.
void RemoveKeys(const std::set<std::string>& upper, const std::string& path, YAML::Node map) {
  std::vector<std::string> gone;
  for (const auto& entry : map) {
    const std::string key = path + entry.first.Scalar();
    if (upper.contains(key)) gone.push_back(entry.first.Scalar());
    if (entry.second.IsMap()) RemoveKeys(upper, key + ".", entry.second);
  }
  for (const std::string& name : gone) map.remove(name);
}

// Adds the entries of `upper` to the map `lower`.
void AddEntries(const YAML::Node& upper, YAML::Node lower) {
  for (const auto& entry : upper) {
    const std::string name = entry.first.Scalar();
    if (entry.second.IsMap() && lower[name] && lower[name].IsMap()) {
      AddEntries(entry.second, lower[name]);
    } else {
      lower[name] = entry.second;
    }
  }
}

}  // namespace

absl::StatusOr<std::string> MergeConfigFiles(const std::string& lower, const std::string& upper) {
  if (upper.empty()) return lower;
  const absl::StatusOr<ConfigFile> parsed = ParseConfigFile("config", upper);
  if (!parsed.ok()) return InvalidFields(v1::REASON_INVALID_CONFIG, {{"config_yaml", std::string(parsed.status().message())}});
  std::set<std::string> keys;
  for (const Assignment& assignment : parsed->assignments) keys.insert(CanonicalKey(assignment.key));
  YAML::Node merged = YAML::Load(lower);
  RemoveKeys(keys, "", merged);
  const YAML::Node above = YAML::Load(upper);
  if (above.IsMap()) AddEntries(above, merged);
  return YAML::Dump(merged) + "\n";
}

absl::StatusOr<ConfigFile> ParseConfigFile(const std::string& file, const std::string& yaml) {
  ConfigFile result;
  try {
    const YAML::Node root = YAML::Load(yaml);
    if (absl::Status status = Reader(file, &result).Read(root); !status.ok()) return status;
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(file + ":" + std::to_string(error.mark.line + 1) + ":" +
                                      std::to_string(error.mark.column + 1) + ": " + error.msg);
  }
  return result;
}

}  // namespace mbridge::recipes
