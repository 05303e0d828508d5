#include "recipes/config/schema.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <tuple>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/options.pb.h"

namespace mbridge::recipes {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr double kLargestInt = 1e15;

bool IsBlend(const FieldDescriptor* field) { return field->message_type() == v1::Blend::descriptor(); }

void CollectKeys(const google::protobuf::Descriptor* message, const std::string& prefix,
                 std::vector<const FieldDescriptor*> chain, std::vector<Key>* keys) {
  for (int i = 0; i < message->field_count(); ++i) {
    const FieldDescriptor* field = message->field(i);
    const std::string path = prefix.empty() ? field->name() : prefix + "." + field->name();
    chain.push_back(field);
    const bool group = field->message_type() != nullptr && !field->is_map() && !IsBlend(field);
    if (group) {
      CollectKeys(field->message_type(), path, chain, keys);
    } else {
      keys->push_back({path, prefix, field->name(), chain, &field->options().GetExtension(v1::key)});
    }
    chain.pop_back();
  }
}

std::string LowerCase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Different spellings of one word: dtype names of PyTorch, activation names of Megatron.
std::string CanonicalWord(const Key& key, const std::string& word) {
  static const std::map<std::string, std::string> dtypes = {
      {"torch.bfloat16", "bf16"}, {"bfloat16", "bf16"},    {"bf16-mixed", "bf16"}, {"torch.float16", "fp16"},
      {"torch.half", "fp16"},     {"float16", "fp16"},     {"16", "fp16"},         {"16-mixed", "fp16"},
      {"torch.float32", "fp32"},  {"torch.float", "fp32"}, {"float32", "fp32"},    {"32", "fp32"}};
  static const std::map<std::string, std::string> activations = {
      {"relu2", "squared_relu"}, {"fast_gelu", "gelu_pytorch_tanh"}, {"swish", "silu"}};
  const bool dtype = key.name.size() > 6 && key.name.compare(key.name.size() - 6, 6, "_dtype") == 0;
  const auto& table = dtype ? dtypes : activations;
  if (dtype || key.name == "activation_func") {
    if (auto it = table.find(word); it != table.end()) return it->second;
  }
  if (key.path == "mixed_precision.preset") {
    std::string name = word;
    std::replace(name.begin(), name.end(), '-', '_');
    return name;
  }
  return word;
}

// Bounds of sizes read better as plain digits than as 1e+12.
std::string Bound(double value) {
  const bool whole = value == std::floor(value) && std::abs(value) < 1e16;
  return whole ? std::to_string(static_cast<int64_t>(value)) : FormatDouble(value);
}

bool InRange(const v1::KeyInfo& info, double value) {
  if (info.has_min() && (info.min_exclusive() ? value <= info.min() : value < info.min())) return false;
  return !info.has_max() || (info.max_exclusive() ? value < info.max() : value <= info.max());
}

std::string Allowed(const Key& key) {
  const std::string range = key.RangeText();
  return "expects " + key.TypeName() + (range.empty() ? "" : " (" + range + ")");
}

// Puts one scalar into a singular field, or adds it to a repeated one.
template <typename Set, typename Add> void Put(const FieldDescriptor* field, const Set& set, const Add& add) {
  if (field->is_repeated()) {
    add();
  } else {
    set();
  }
}

std::optional<std::string> WriteScalar(const Key& key, const Value& value, Message* message) {
  const FieldDescriptor* field = key.chain.back();
  const Reflection* reflection = message->GetReflection();
  const std::string got = "is " + FormatValue(value) + ", " + KindName(value) + "; " + Allowed(key);
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64: {
      if (value.kind != Value::Kind::kInt) {
        const bool whole =
            value.kind == Value::Kind::kDouble && std::abs(value.number) < 1e15 && value.number == std::floor(value.number);
        return got + (whole ? "; write " + std::to_string(static_cast<int64_t>(value.number)) : "");
      }
      if (!InRange(*key.info, value.number)) return "is " + value.text + "; allowed: " + key.RangeText();
      // Doubles hold these exactly, and products of two sizes fit 64 bits.
      if (std::abs(value.number) > kLargestInt) return "is " + value.text + "; allowed: at most " + Bound(kLargestInt);
      Put(
          field, [&] { reflection->SetInt64(message, field, value.integer); },
          [&] { reflection->AddInt64(message, field, value.integer); });
      return std::nullopt;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      if (value.kind != Value::Kind::kInt && value.kind != Value::Kind::kDouble) return got;
      if (!std::isfinite(value.number) && key.info->default_value() != "inf")
        return "is " + value.text + "; expects a finite number";
      if (std::isnan(value.number)) return "is nan; expects a number";
      if (!InRange(*key.info, value.number)) return "is " + value.text + "; allowed: " + key.RangeText();
      Put(
          field, [&] { reflection->SetDouble(message, field, value.number); },
          [&] { reflection->AddDouble(message, field, value.number); });
      return std::nullopt;
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (value.kind != Value::Kind::kBool) return got + "; write true or false";
      Put(
          field, [&] { reflection->SetBool(message, field, value.boolean); },
          [&] { reflection->AddBool(message, field, value.boolean); });
      return std::nullopt;
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      if (value.kind == Value::Kind::kList || value.kind == Value::Kind::kMap) return got;
      const std::string word = CanonicalWord(key, value.text);
      const auto& allowed = key.info->allowed();
      if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), word) == allowed.end()) {
        return "is " + FormatValue(Value::String(word)) + "; allowed: " + key.RangeText() +
               DidYouMean(word, {allowed.begin(), allowed.end()});
      }
      Put(
          field, [&] { reflection->SetString(message, field, word); }, [&] { reflection->AddString(message, field, word); });
      return std::nullopt;
    }
    default: return got;
  }
}

// [[prefix,...],[weight,...]] or [[prefix,...],null].
std::optional<std::string> WriteBlend(const Value& value, v1::Blend* blend) {
  const char* form = "expects [[prefix,...],[weight,...]] or [[prefix,...],null]";
  if (value.kind != Value::Kind::kList || value.list.size() != 2 || value.list[0].kind != Value::Kind::kList) return form;
  for (const Value& prefix : value.list[0].list) {
    if (prefix.kind == Value::Kind::kList || prefix.kind == Value::Kind::kMap || prefix.text.empty()) return form;
    blend->add_prefixes(prefix.text);
  }
  const Value& weights = value.list[1];
  if (weights.is_null()) return std::nullopt;
  if (weights.kind != Value::Kind::kList || weights.list.size() != value.list[0].list.size()) {
    return "expects as many weights as prefixes: [[a,b],[0.3,0.7]]";
  }
  for (const Value& weight : weights.list) {
    if ((weight.kind != Value::Kind::kInt && weight.kind != Value::Kind::kDouble) || !(weight.number > 0) ||
        !std::isfinite(weight.number)) {
      return "has the weight " + FormatValue(weight) + "; weights are numbers > 0";
    }
    blend->add_weights(weight.number);
  }
  return std::nullopt;
}

Value ReadBlend(const v1::Blend& blend) {
  std::vector<Value> prefixes, weights;
  for (const std::string& prefix : blend.prefixes()) prefixes.push_back(Value::String(prefix));
  for (double weight : blend.weights()) weights.push_back(Value::Double(weight));
  return Value::List({Value::List(prefixes), weights.empty() ? Value::Null() : Value::List(weights)});
}

std::optional<std::string> WriteMap(const Key& key, const Value& value, v1::ConfigContainer* config) {
  if (value.kind != Value::Kind::kMap) return "expects {NAME:value,...}";
  auto* map = config->mutable_env_vars();
  map->clear();
  for (const auto& [name, item] : value.map) {
    if (name.empty() || item.kind == Value::Kind::kList || item.kind == Value::Kind::kMap) return "expects {NAME:value,...}";
    (*map)[name] = item.text;
  }
  return std::nullopt;
}

std::optional<std::string> WriteRepeated(const Key& key, const Value& value, Message* message) {
  const FieldDescriptor* field = key.chain.back();
  std::vector<Value> items = value.kind == Value::Kind::kList ? value.list : std::vector<Value>{value};
  if (key.path == "dataset.data_path" && value.kind == Value::Kind::kString) {
    items.clear();  // Megatron-LM's form: one text, parts separated by blanks.
    std::string part;
    for (char c : value.text + " ") {
      if (c != ' ') {
        part += c;
      } else if (!part.empty()) {
        items.push_back(ParseWord(std::exchange(part, "")));
      }
    }
  }
  for (const Value& item : items) {
    if (item.is_null() && !IsBlend(field)) return "has an empty item; " + Allowed(key);
    if (IsBlend(field)) {
      auto* blend = static_cast<v1::Blend*>(message->GetReflection()->AddMessage(message, field));
      if (item.is_null()) continue;
      if (auto wrong = WriteBlend(item, blend)) return wrong;
    } else if (auto wrong = WriteScalar(key, item, message)) {
      return wrong;
    }
  }
  return std::nullopt;
}

Value ReadItem(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* r = message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64: return Value::Int(r->GetRepeatedInt64(message, field, index));
    case FieldDescriptor::CPPTYPE_DOUBLE: return Value::Double(r->GetRepeatedDouble(message, field, index));
    case FieldDescriptor::CPPTYPE_BOOL: return Value::Bool(r->GetRepeatedBool(message, field, index));
    case FieldDescriptor::CPPTYPE_STRING: return Value::String(r->GetRepeatedString(message, field, index));
    default: return ReadBlend(static_cast<const v1::Blend&>(r->GetRepeatedMessage(message, field, index)));
  }
}

}  // namespace

bool Key::Works() const { return info->effect() == v1::EFFECT_UNSPECIFIED; }

std::string Key::TypeName() const {
  const FieldDescriptor* field = chain.back();
  if (field->is_map()) return "map";
  std::string name;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64: name = "int"; break;
    case FieldDescriptor::CPPTYPE_DOUBLE: name = "float"; break;
    case FieldDescriptor::CPPTYPE_BOOL: name = "bool"; break;
    case FieldDescriptor::CPPTYPE_STRING: name = "text"; break;
    default: name = "blend";
  }
  return field->is_repeated() ? "list of " + name : name;
}

std::string Key::RangeText() const {
  std::string words;
  for (const std::string& word : info->allowed()) words += (words.empty() ? "" : " | ") + word;
  if (!words.empty()) return words;
  if (info->has_min() && info->has_max()) {
    return Bound(info->min()) + " .. " + (info->max_exclusive() ? "below " : "") + Bound(info->max());
  }
  if (info->has_max() && !info->has_min()) return "<= " + Bound(info->max());
  if (info->has_min()) return (info->min_exclusive() ? "> " : ">= ") + Bound(info->min());
  return "";
}

std::string Key::Help() const { return info->help(); }

Value Key::Default() const {
  if (info->default_value().empty()) return Value::Null();
  absl::StatusOr<Value> value = ParseValue(info->default_value());
  return value.ok() ? *value : Value::String(info->default_value());
}

Schema::Schema() {
  CollectKeys(v1::ConfigContainer::descriptor(), "", {}, &keys_);
  for (size_t i = 0; i < keys_.size(); ++i) by_path_[keys_[i].path] = i;
}

const Schema& Schema::Get() {
  static const Schema* schema = new Schema();
  return *schema;
}

const Key* Schema::Find(std::string_view path) const {
  auto it = by_path_.find(std::string(path));
  return it == by_path_.end() ? nullptr : &keys_[it->second];
}

bool Schema::IsGroup(std::string_view name) const {
  const FieldDescriptor* field = v1::ConfigContainer::descriptor()->FindFieldByName(std::string(name));
  return field != nullptr && !field->is_map();
}

std::vector<std::string> Schema::Nearest(const std::string& path, int limit) const {
  const std::string leaf = path.substr(path.rfind('.') + 1);
  const std::string group = path.find('.') == std::string::npos ? "" : path.substr(0, path.find('.'));
  // Score, then keys that work before others, then the order of the schema.
  std::vector<std::tuple<int, bool, size_t>> found;
  for (size_t i = 0; i < keys_.size(); ++i) {
    const int whole = EditDistance(path, keys_[i].path);
    const int last = EditDistance(leaf, keys_[i].name) * 2 + (group == keys_[i].group ? 0 : 1);
    const int score = std::min(whole * 2, last);
    const int bound = std::max<int>(4, static_cast<int>(leaf.size()) * 2 / 3);
    if (score <= bound) found.emplace_back(score, !keys_[i].Works(), i);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> names;
  for (const auto& [score, unused, index] : found) {
    if (static_cast<int>(names.size()) == limit || score > std::get<0>(found.front()) * 2 + 2) break;
    names.push_back(keys_[index].path);
  }
  return names;
}

Value ReadKey(const v1::ConfigContainer& config, const Key& key) {
  const Message* message = &config;
  for (size_t i = 0; i + 1 < key.chain.size(); ++i) {
    if (!message->GetReflection()->HasField(*message, key.chain[i])) return Value::Null();
    message = &message->GetReflection()->GetMessage(*message, key.chain[i]);
  }
  const FieldDescriptor* field = key.chain.back();
  const Reflection* r = message->GetReflection();
  if (field->is_map()) {
    Value map;
    map.kind = Value::Kind::kMap;
    const std::map<std::string, std::string> sorted(config.env_vars().begin(), config.env_vars().end());
    for (const auto& [name, value] : sorted) map.map.push_back({name, Value::String(value)});
    return map.map.empty() ? Value::Null() : map;
  }
  if (field->is_repeated()) {
    std::vector<Value> items;
    for (int i = 0; i < r->FieldSize(*message, field); ++i) items.push_back(ReadItem(*message, field, i));
    return items.empty() ? Value::Null() : Value::List(std::move(items));
  }
  if (!r->HasField(*message, field)) return Value::Null();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64: return Value::Int(r->GetInt64(*message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE: return Value::Double(r->GetDouble(*message, field));
    case FieldDescriptor::CPPTYPE_BOOL: return Value::Bool(r->GetBool(*message, field));
    case FieldDescriptor::CPPTYPE_STRING: return Value::String(r->GetString(*message, field));
    default: return ReadBlend(static_cast<const v1::Blend&>(r->GetMessage(*message, field)));
  }
}

std::optional<std::string> WriteKey(const Key& key, const Value& value, v1::ConfigContainer* config) {
  Message* message = config;
  for (size_t i = 0; i + 1 < key.chain.size(); ++i) {
    message = message->GetReflection()->MutableMessage(message, key.chain[i]);
  }
  const FieldDescriptor* field = key.chain.back();
  const Reflection* reflection = message->GetReflection();
  if (value.is_null()) {
    reflection->ClearField(message, field);
    return std::nullopt;
  }
  std::unique_ptr<Message> before(message->New());
  before->CopyFrom(*message);
  std::optional<std::string> wrong;
  if (field->is_map()) {
    wrong = WriteMap(key, value, config);
  } else if (field->is_repeated()) {
    reflection->ClearField(message, field);
    wrong = WriteRepeated(key, value, message);
  } else if (IsBlend(field)) {
    reflection->ClearField(message, field);
    wrong = WriteBlend(value, static_cast<v1::Blend*>(reflection->MutableMessage(message, field)));
  } else {
    wrong = WriteScalar(key, value, message);
  }
  if (wrong) message->CopyFrom(*before);
  return wrong;
}

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string NearestWord(const std::string& word, const std::vector<std::string>& words) {
  std::string best;
  int best_distance = std::max<int>(2, static_cast<int>(word.size()) / 3) + 1;
  for (const std::string& candidate : words) {
    const int distance = EditDistance(LowerCase(word), LowerCase(candidate));
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  constexpr size_t kShortestPart = 3;
  const std::string part = LowerCase(word);
  if (!best.empty() || part.size() < kShortestPart) return best;
  size_t best_place = std::string::npos;
  for (const std::string& candidate : words) {
    const size_t place = LowerCase(candidate).find(part);
    if (place >= best_place) continue;
    best_place = place;
    best = candidate;
  }
  return best;
}

std::string DidYouMean(const std::string& word, const std::vector<std::string>& words) {
  const std::string near = NearestWord(word, words);
  return near.empty() ? "" : "; did you mean " + near + "?";
}

std::vector<KeyDescription> DescribeKeys(const std::string& pattern) {
  const std::string wanted = LowerCase(pattern);
  std::vector<KeyDescription> found;
  for (const Key& key : Schema::Get().keys()) {
    const v1::KeyInfo& info = *key.info;
    if (LowerCase(key.path + " " + info.help()).find(wanted) == std::string::npos) continue;
    std::string effect;
    if (info.effect() == v1::EFFECT_PLANNED) effect = "planned";
    if (info.effect() == v1::EFFECT_NONE) effect = "no effect: " + info.instead();
    found.push_back({key.path, key.TypeName(), info.default_value().empty() ? "null" : info.default_value(), key.RangeText(),
                     info.help(), effect, info.mlm_flag()});
  }
  return found;
}

}  // namespace mbridge::recipes
