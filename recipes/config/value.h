// Values of the configuration language: what stands right of `=` in an override and in a YAML file.
//
// Hydra-like grammar: null, true, false, 12, 1_000, 3e-4, inf, word, 'quoted' or "quoted", [list], {key:value}.
// Thread-safe: free functions on values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace mbridge::recipes {

struct Value {
  struct Entry;  // Key and value, in the order written.
  enum class Kind { kNull, kBool, kInt, kDouble, kString, kList, kMap };

  Kind kind = Kind::kNull;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0.0;  // Also set for kInt.
  std::string text;     // Content of a string; of other scalars, the text they were written as.
  std::vector<Value> list;
  std::vector<Entry> map;

  static Value Null();
  static Value Bool(bool value);
  static Value Int(int64_t value);
  static Value Double(double value);
  static Value String(std::string value);
  static Value List(std::vector<Value> values);

  bool is_null() const { return kind == Kind::kNull; }
  // Same value; 1 equals 1.0.
  bool operator==(const Value& other) const;
};

struct Value::Entry {
  std::string key;
  Value value;

  bool operator==(const Entry& other) const = default;
};

inline Value Value::Null() { return {}; }

// INVALID_ARGUMENT says what is wrong and where; blanks at the ends and the empty text are errors.
absl::StatusOr<Value> ParseValue(const std::string& text);

// One unquoted word: null, boolean, number or string.
Value ParseWord(const std::string& word);

// Text that ParseValue reads back to the same value; strings are quoted only where that is needed.
std::string FormatValue(const Value& value);

// Shortest text that reads back to the same double.
std::string FormatDouble(double value);

// What a value is, in words: "a whole number", "a list".
std::string KindName(const Value& value);

}  // namespace mbridge::recipes
