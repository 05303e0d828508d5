#include "engine/bridge/config_form.h"

#include <fmt/format.h>

namespace mbridge {
namespace {

constexpr const char* kLocalBase = "rope_local_base_freq";  // Gemma 3: base of the layers with a window.

// Python's json module writes and reads these words as numbers; JSON does not know them.
std::string QuoteSpecialNumbers(std::string_view text) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (in_string && c == '\\' && i + 1 < text.size()) {
      result.append(text.substr(i, 2));
      i += 2;
      continue;
    }
    if (c == '"') in_string = !in_string;
    if (!in_string) {
      bool replaced = false;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        if (text.substr(i, word.size()) != word) continue;
        result += fmt::format("{{\"__float__\": \"{}\"}}", word);
        i += word.size();
        replaced = true;
        break;
      }
      if (replaced) continue;
    }
    result += c;
    ++i;
  }
  return result;
}

void MoveKey(Json* object, const char* from, const char* to) {
  const auto it = object->find(from);
  if (it == object->end()) return;
  if (!object->contains(to)) (*object)[to] = *it;
  object->erase(from);
}

}  // namespace

absl::StatusOr<Json> ParseConfigJson(std::string_view text, const std::string& path) {
  try {
    Json config = Json::parse(QuoteSpecialNumbers(text));
    if (config.is_object()) return config;
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG, fmt::format("{} is no JSON object", path));
  } catch (const Json::exception& error) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG,
                      fmt::format("{} is not JSON: {}", path, error.what()));
  }
}

Json ModernForm(const Json& config) {
  Json modern = config;
  MoveKey(&modern, "torch_dtype", "dtype");
  if (modern.contains("rope_parameters")) return modern;
  if (!modern.contains("rope_theta") && !modern.contains("rope_scaling")) return modern;
  Json rope = Json::object();
  if (modern.contains("rope_scaling") && modern["rope_scaling"].is_object()) rope = modern["rope_scaling"];
  MoveKey(&rope, "type", "rope_type");
  if (!rope.contains("rope_type")) rope["rope_type"] = "default";
  if (modern.contains("rope_theta")) rope["rope_theta"] = modern["rope_theta"];
  if (modern.contains("partial_rotary_factor")) rope["partial_rotary_factor"] = modern["partial_rotary_factor"];
  if (modern.contains(kLocalBase)) {
    rope = {{"full_attention", rope}, {"sliding_attention", {{"rope_theta", modern[kLocalBase]}, {"rope_type", "default"}}}};
    modern.erase(kLocalBase);
  }
  modern.erase("rope_theta");
  modern.erase("rope_scaling");
  modern["rope_parameters"] = rope;
  return modern;
}

Json InFormOf(const Json& source, const Json& modern) {
  Json config = modern;
  if (source.contains("torch_dtype")) MoveKey(&config, "dtype", "torch_dtype");
  const bool old_rope = !source.contains("rope_parameters") && (source.contains("rope_theta") || source.contains("rope_scaling"));
  if (!old_rope || !config.contains("rope_parameters")) return config;
  Json rope = config["rope_parameters"];
  config.erase("rope_parameters");
  if (rope.contains("full_attention")) {
    if (rope.contains("sliding_attention")) config[kLocalBase] = rope["sliding_attention"].value("rope_theta", Json());
    rope = Json(rope["full_attention"]);
  }
  if (rope.contains("rope_theta")) config["rope_theta"] = rope["rope_theta"];
  rope.erase("rope_theta");
  if (rope.contains("partial_rotary_factor")) {  // Readers of the old form look for it at the top.
    config["partial_rotary_factor"] = rope["partial_rotary_factor"];
    rope.erase("partial_rotary_factor");
  }
  const bool scaled = rope.value("rope_type", "default") != "default";
  if (scaled && source.contains("rope_scaling") && source["rope_scaling"].is_object() &&
      !source["rope_scaling"].contains("rope_type")) {
    MoveKey(&rope, "rope_type", "type");
  }
  config["rope_scaling"] = scaled ? rope : Json();
  return config;
}

}  // namespace mbridge
