#include "recipes/config/config_state.h"

#include <stdexcept>

#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

const Key& KeyOf(const std::string& path) {
  const Key* key = Schema::Get().Find(path);
  if (key == nullptr) throw std::logic_error("no such key: " + path);
  return *key;
}

}  // namespace

void ConfigState::Set(const std::string& key, const Value& value, v1::Origin origin, const std::string& source, int level) {
  if (auto wrong = WriteKey(KeyOf(key), value, &config)) {
    Fail(key, *wrong + (origin == v1::ORIGIN_OVERRIDE ? "" : " (" + source + ")"));
    return;
  }
  settings[key] = {origin, source, level, Get(key)};
}

void ConfigState::Derive(const std::string& key, const Value& value, const std::string& from) {
  if (auto wrong = WriteKey(KeyOf(key), value, &config)) return Fail(key, "follows from " + from + ": " + *wrong);
  Setting& setting = settings[key];
  setting.origin = v1::ORIGIN_DERIVED;
  setting.source = from;
}

void ConfigState::Change(const std::string& key, const Value& value, const std::string& why, int from_level) {
  const Value old = Get(key);
  if (old == value) return;
  if (LevelOf(key) >= from_level) RecordChange(key, old, value, why);
  Derive(key, value, why);
}

void ConfigState::RecordChange(const std::string& key, const Value& old_value, const Value& new_value, const std::string& why) {
  v1::AutomaticChange change;
  change.set_key(key);
  change.set_old_value(FormatValue(old_value));
  change.set_new_value(FormatValue(new_value));
  change.set_why(why);
  changes.push_back(change);
}

Value ConfigState::Get(const std::string& key) const { return ReadKey(config, KeyOf(key)); }

int ConfigState::LevelOf(const std::string& key) const {
  auto it = settings.find(key);
  return it == settings.end() ? kUnset : it->second.level;
}

void ConfigState::Unify(const std::string& first, const std::string& second, const std::string& why) {
  const int a = LevelOf(first), b = LevelOf(second);
  if (Get(first) == Get(second)) return;
  if (a == b && a >= kFile) {
    Fail(first, "is " + Text(first) + " but " + second + " is " + Text(second) + "; they mean the same: set one of them");
  } else if (a >= b) {
    Change(second, Get(first), why);
  } else {
    Change(first, Get(second), why);
  }
}

}  // namespace mbridge::recipes
