#include "recipes/config/value.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

namespace mbridge::recipes {
namespace {

constexpr int kMaxDepth = 16;

absl::Status Wrong(const std::string& what) { return absl::InvalidArgumentError(what); }

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Digits may be grouped with single underscores, as in Python; empty when `word` is no such number.
std::string WithoutUnderscores(const std::string& word) {
  std::string digits;
  for (size_t i = 0; i < word.size(); ++i) {
    if (word[i] != '_') {
      digits += word[i];
      continue;
    }
    const bool between_digits = i > 0 && i + 1 < word.size() && std::isdigit(static_cast<unsigned char>(word[i - 1])) &&
                                std::isdigit(static_cast<unsigned char>(word[i + 1]));
    if (!between_digits) return "";
  }
  return digits;
}

bool ParseNumber(const std::string& word, Value* value) {
  std::string digits = WithoutUnderscores(word);
  if (!digits.empty() && digits[0] == '+') digits.erase(0, 1);
  if (digits.empty()) return false;
  const char* begin = digits.data();
  const char* end = begin + digits.size();
  int64_t integer = 0;
  if (auto [rest, error] = std::from_chars(begin, end, integer); error == std::errc() && rest == end) {
    *value = Value::Int(integer);
    return true;
  }
  const std::string lower = Lower(digits);
  const std::string unsigned_word = lower[0] == '-' ? lower.substr(1) : lower;
  if (unsigned_word == "inf" || unsigned_word == "nan") {
    const double special = unsigned_word == "inf" ? std::numeric_limits<double>::infinity() : std::nan("");
    *value = Value::Double(lower[0] == '-' ? -special : special);
    return true;
  }
  // from_chars would also take "infinity" and hexadecimal words: only digits may start a number here.
  if (!std::isdigit(static_cast<unsigned char>(unsigned_word[0])) && unsigned_word[0] != '.') return false;
  double number = 0.0;
  if (auto [rest, error] = std::from_chars(begin, end, number); error == std::errc() && rest == end) {
    *value = Value::Double(number);
    return true;
  }
  return false;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  absl::StatusOr<Value> ParseAll() {
    absl::StatusOr<Value> value = Parse(/*delimiters=*/"", 0);
    if (value.ok() && at_ != text_.size())
      return Wrong("unexpected text after position " + std::to_string(at_) + ": " + text_.substr(at_));
    return value;
  }

 private:
  absl::StatusOr<Value> Parse(const std::string& delimiters, int depth) {
    if (depth > kMaxDepth) return Wrong("nested deeper than " + std::to_string(kMaxDepth) + " levels");
    SkipBlanks();
    if (at_ == text_.size()) return Wrong("a value is missing at the end");
    const char c = text_[at_];
    if (c == '\'' || c == '"') return ParseQuoted();
    if (c == '[') return ParseList(depth);
    if (c == '{') return ParseMap(depth);
    const size_t begin = at_;
    while (at_ < text_.size() && delimiters.find(text_[at_]) == std::string::npos) ++at_;
    size_t end = at_;
    while (end > begin && IsBlank(text_[end - 1])) --end;
    if (end == begin) return Wrong("a value is missing at position " + std::to_string(begin));
    return ParseWord(text_.substr(begin, end - begin));
  }

  absl::StatusOr<Value> ParseQuoted() {
    const char quote = text_[at_++];
    std::string content;
    while (at_ < text_.size() && text_[at_] != quote) {
      const bool escape = text_[at_] == '\\' && at_ + 1 < text_.size() && (text_[at_ + 1] == quote || text_[at_ + 1] == '\\');
      if (escape) ++at_;
      content += text_[at_++];
    }
    if (at_ == text_.size()) return Wrong(std::string("the closing ") + quote + " is missing");
    ++at_;
    return Value::String(content);
  }

  absl::StatusOr<Value> ParseList(int depth) {
    ++at_;
    Value list = Value::List({});
    for (SkipBlanks(); !Take(']'); SkipBlanks()) {
      if (!list.list.empty() && !Take(',')) return Wrong("expected , or ] at position " + std::to_string(at_));
      absl::StatusOr<Value> item = Parse(",]", depth + 1);
      if (!item.ok()) return item;
      list.list.push_back(*std::move(item));
    }
    return list;
  }

  absl::StatusOr<Value> ParseMap(int depth) {
    ++at_;
    Value map;
    map.kind = Value::Kind::kMap;
    for (SkipBlanks(); !Take('}'); SkipBlanks()) {
      if (!map.map.empty() && !Take(',')) return Wrong("expected , or } at position " + std::to_string(at_));
      absl::StatusOr<Value> key = Parse(":,}", depth + 1);
      if (!key.ok()) return key;
      SkipBlanks();
      if (!Take(':')) return Wrong("expected : after the name " + key->text);
      absl::StatusOr<Value> item = Parse(",}", depth + 1);
      if (!item.ok()) return item;
      map.map.push_back({key->text, *std::move(item)});
    }
    return map;
  }

  void SkipBlanks() {
    while (at_ < text_.size() && IsBlank(text_[at_])) ++at_;
  }

  bool Take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  const std::string& text_;
  size_t at_ = 0;
};

bool NeedsQuotes(const std::string& text) {
  if (text.empty() || IsBlank(text.front()) || IsBlank(text.back())) return true;
  if (text.find_first_of("[]{},:'\"\n\r\t\\") != std::string::npos) return true;
  return ParseWord(text).kind != Value::Kind::kString;
}

std::string Quote(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

}  // namespace

Value Value::Bool(bool value) {
  Value v;
  v.kind = Kind::kBool;
  v.boolean = value;
  v.text = value ? "true" : "false";
  return v;
}

Value Value::Int(int64_t value) {
  Value v;
  v.kind = Kind::kInt;
  v.integer = value;
  v.number = static_cast<double>(value);
  v.text = std::to_string(value);
  return v;
}

Value Value::Double(double value) {
  Value v;
  v.kind = Kind::kDouble;
  v.number = value;
  v.text = FormatDouble(value);
  return v;
}

Value Value::String(std::string value) {
  Value v;
  v.kind = Kind::kString;
  v.text = std::move(value);
  return v;
}

Value Value::List(std::vector<Value> values) {
  Value v;
  v.kind = Kind::kList;
  v.list = std::move(values);
  return v;
}

bool Value::operator==(const Value& other) const {
  const bool numbers = (kind == Kind::kInt || kind == Kind::kDouble) && (other.kind == Kind::kInt || other.kind == Kind::kDouble);
  if (numbers) return number == other.number;
  if (kind != other.kind) return false;
  switch (kind) {
    case Kind::kNull: return true;
    case Kind::kBool: return boolean == other.boolean;
    case Kind::kString: return text == other.text;
    case Kind::kList: return list == other.list;
    case Kind::kMap: return map == other.map;
    default: return false;
  }
}

Value ParseWord(const std::string& word) {
  const std::string lower = Lower(word);
  Value value = Value::String(word);
  if (lower == "null") {
    value = Value::Null();
  } else if (lower == "true" || lower == "false") {
    value = Value::Bool(lower == "true");
  } else {
    ParseNumber(word, &value);
  }
  value.text = word;
  return value;
}

absl::StatusOr<Value> ParseValue(const std::string& text) {
  if (text.empty()) return Wrong("the value is empty; write null for no value or '' for an empty text");
  if (IsBlank(text.front()) || IsBlank(text.back()))
    return Wrong("the value has blanks at its ends; quote it if they belong to it");
  return Parser(text).ParseAll();
}

std::string FormatDouble(double value) {
  char buffer[64];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, end);
}

std::string FormatValue(const Value& value) {
  switch (value.kind) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kBool: return value.boolean ? "true" : "false";
    case Value::Kind::kInt: return std::to_string(value.integer);
    case Value::Kind::kDouble: return FormatDouble(value.number);
    case Value::Kind::kString: return NeedsQuotes(value.text) ? Quote(value.text) : value.text;
    case Value::Kind::kList: {
      std::string text = "[";
      for (const Value& item : value.list) text += (text.size() > 1 ? "," : "") + FormatValue(item);
      return text + "]";
    }
    case Value::Kind::kMap: {
      std::string text = "{";
      for (const auto& [key, item] : value.map) {
        text += (text.size() > 1 ? "," : "") + FormatValue(Value::String(key)) + ":" + FormatValue(item);
      }
      return text + "}";
    }
  }
  return "null";
}

std::string KindName(const Value& value) {
  switch (value.kind) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kBool: return "a boolean";
    case Value::Kind::kInt: return "a whole number";
    case Value::Kind::kDouble: return "a number with a fraction";
    case Value::Kind::kString: return "a text";
    case Value::Kind::kList: return "a list";
    case Value::Kind::kMap: return "a map";
  }
  return "null";
}

}  // namespace mbridge::recipes
