#include "engine/bridge/config_keys.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace mbridge {
namespace {

const Json kNull;

std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

ConfigKey MakeIntKey(std::string name, int64_t GptConfig::*field, std::function<int64_t(const GptConfig&)> absent) {
  const auto read = [name, field, absent = std::move(absent)](ConfigReader* from, GptConfig* to) {
    if (absent == nullptr) {
      to->*field = from->Int(name);
      return;
    }
    const int64_t value = absent(*to);
    to->*field = from->Int(name, &value);
  };
  const auto write = [name, field](const GptConfig& from, Json* to) { (*to)[name] = from.*field; };
  return {{std::move(name)}, read, write};
}

// By layer, 1: "sliding_attention", 0: "full_attention".
std::vector<int64_t> LayerTypes(ConfigReader* from, const GptConfig& config) {
  std::vector<int64_t> windowed;
  const Json& types = from->Get("layer_types");
  bool known = types.is_array() && std::cmp_equal(types.size(), config.num_layers);
  if (known) {
    for (const Json& type : types) {
      known = known && (type == "sliding_attention" || type == "full_attention");
      windowed.push_back(type == "sliding_attention");
    }
  }
  if (known) return windowed;
  from->Unsupported("layer_types",
                    fmt::format("sliding_attention or full_attention for each of the {} layers", config.num_layers));
  return {};
}

std::vector<int64_t> FromLayerOn(int64_t first, int64_t num_layers) {
  std::vector<int64_t> flags;
  for (int64_t i = 0; i < num_layers; ++i) flags.push_back(i >= first);
  return flags;
}

// A window in all layers or in none needs no pattern.
void SetWindow(int64_t window, const std::vector<int64_t>& windowed, GptConfig* to) {
  const auto count = std::count(windowed.begin(), windowed.end(), 1);
  to->attention_window = count > 0 ? window : 0;
  to->window_attn_skip_freq.clear();
  if (to->attention_window > 0 && std::cmp_less(count, windowed.size())) to->window_attn_skip_freq = windowed;
}

std::vector<std::string> LayerTypeNames(const GptConfig& config) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < config.num_layers; ++i)
    names.emplace_back(AttentionWindowOf(config, i) > 0 ? "sliding_attention" : "full_attention");
  return names;
}

}  // namespace

const Json& ConfigReader::Get(const std::string& key) const {
  const Json* at = &config_;
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('/', begin), key.size());
    if (!at->is_object()) return kNull;
    const auto it = at->find(key.substr(begin, end - begin));
    if (it == at->end()) return kNull;
    at = &*it;
    begin = end + 1;
  }
  return *at;
}

bool ConfigReader::Has(const std::string& key) const { return !Get(key).is_null(); }

void ConfigReader::Fault(const std::string& key, const std::string& description) {
  faults_.push_back({"config.json: " + key, description});
}

void ConfigReader::Unsupported(const std::string& key, const std::string& supported) {
  Fault(key, fmt::format("is {}: supported is {}", Shown(Get(key)), supported));
}

int64_t ConfigReader::Int(const std::string& key, const int64_t* absent) {
  const Json& value = Get(key);
  constexpr int64_t kLargest = (int64_t{1} << 31) - 1;  // Products of two sizes stay below 2^63.
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(kLargest)
                                               : value.is_number_integer() && value.get<int64_t>() >= -1;
  if (fits) return value.get<int64_t>();
  if (value.is_number_integer()) {
    Fault(key, fmt::format("is {}: at most {}", Shown(value), kLargest));
    return 0;
  }
  if (value.is_null() && absent != nullptr) return *absent;
  Fault(key, value.is_null() ? "is missing" : fmt::format("is {}: a whole number is needed", Shown(value)));
  return 0;
}

double ConfigReader::Real(const std::string& key, const double* absent) {
  const Json& value = Get(key);
  if (value.is_number()) return value.get<double>();
  if (value.is_null() && absent != nullptr) return *absent;
  Fault(key, value.is_null() ? "is missing" : fmt::format("is {}: a number is needed", Shown(value)));
  return 0.0;
}

bool ConfigReader::Flag(const std::string& key, const bool* absent) {
  const Json& value = Get(key);
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_null() && absent != nullptr) return *absent;
  Fault(key, value.is_null() ? "is missing" : fmt::format("is {}: true or false is needed", Shown(value)));
  return false;
}

std::string ConfigReader::Text(const std::string& key, const std::string& absent) {
  const Json& value = Get(key);
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_null()) Fault(key, fmt::format("is {}: a text is needed", Shown(value)));
  return absent;
}

absl::Status ConfigReader::status() const {
  return faults_.empty() ? absl::OkStatus() : InvalidFields(v1::REASON_UNSUPPORTED_MODEL, faults_);
}

ConfigKey IntKey(std::string name, int64_t GptConfig::*field) { return MakeIntKey(std::move(name), field, nullptr); }

ConfigKey IntKey(std::string name, int64_t GptConfig::*field, std::function<int64_t(const GptConfig&)> absent) {
  return MakeIntKey(std::move(name), field, std::move(absent));
}

ConfigKey RealKey(std::string name, double GptConfig::*field) {
  const auto read = [name, field](ConfigReader* from, GptConfig* to) { to->*field = from->Real(name); };
  const auto write = [name, field](const GptConfig& from, Json* to) { (*to)[name] = from.*field; };
  return {{std::move(name)}, read, write};
}

ConfigKey RealKey(std::string name, double GptConfig::*field, double absent) {
  ConfigKey key = RealKey(name, field);
  key.read = [name = std::move(name), field, absent](ConfigReader* from, GptConfig* to) {
    to->*field = from->Real(name, &absent);
  };
  return key;
}

ConfigKey FlagKey(std::string name, bool GptConfig::*field, bool absent) {
  const auto read = [name, field, absent](ConfigReader* from, GptConfig* to) { to->*field = from->Flag(name, &absent); };
  const auto write = [name, field](const GptConfig& from, Json* to) { (*to)[name] = from.*field; };
  return {{std::move(name)}, read, write};
}

ConfigKey OnlyKey(std::string name, Json value, bool absent) {
  const auto read = [name, value, absent](ConfigReader* from, GptConfig*) {
    const Json& found = from->Get(name);
    if (found == value || (absent && found.is_null())) return;
    from->Unsupported(name, Shown(value));
  };
  const auto write = [name, value = std::move(value)](const GptConfig&, Json* to) { (*to)[name] = value; };
  return {{std::move(name)}, read, write};
}

ConfigKey OneOfKey(std::string name, std::vector<Json> values) {
  const auto read = [name, values](ConfigReader* from, GptConfig*) {
    const Json& found = from->Get(name);
    if (found.is_null()) return;
    std::string supported;
    for (const Json& value : values) {
      if (found == value) return;
      supported += (supported.empty() ? "" : " or ") + Shown(value);
    }
    from->Unsupported(name, supported);
  };
  const auto write = [name, value = values.front()](const GptConfig&, Json* to) { (*to)[name] = value; };
  return {{std::move(name)}, read, write};
}

ConfigKey FreeKeys(std::vector<std::string> names) { return {std::move(names), nullptr, nullptr}; }

ConfigKey CustomKey(std::vector<std::string> names, std::function<void(ConfigReader*, GptConfig*)> read,
                    std::function<void(const GptConfig&, Json*)> write) {
  return {std::move(names), std::move(read), std::move(write)};
}

std::vector<ConfigKey> DecoderKeys(int64_t head_dim) {
  return {IntKey("vocab_size", &GptConfig::padded_vocab_size),
          IntKey("hidden_size", &GptConfig::hidden_size),
          IntKey("num_hidden_layers", &GptConfig::num_layers),
          IntKey("num_attention_heads", &GptConfig::num_attention_heads),
          IntKey("num_key_value_heads", &GptConfig::num_query_groups, [](const GptConfig& c) { return c.num_attention_heads; }),
          IntKey("head_dim", &GptConfig::kv_channels,
                 [head_dim](const GptConfig& c) {
                   if (head_dim > 0 || c.num_attention_heads == 0) return head_dim;
                   return c.hidden_size / c.num_attention_heads;
                 }),
          IntKey("intermediate_size", &GptConfig::ffn_hidden_size),
          IntKey("max_position_embeddings", &GptConfig::max_position_embeddings),
          RealKey("initializer_range", &GptConfig::init_method_std, 0.02),
          RealKey("attention_dropout", &GptConfig::attention_dropout, 0.0)};
}

ConfigKey SlidingWindowKey(bool used_if_absent) {
  const auto read = [used_if_absent](ConfigReader* from, GptConfig* to) {
    const int64_t none = 0;
    const int64_t window = from->Flag("use_sliding_window", &used_if_absent) ? from->Int("sliding_window", &none) : 0;
    const int64_t first = from->Int("max_window_layers", &none);  // The layers before it see everything.
    SetWindow(window, from->Has("layer_types") ? LayerTypes(from, *to) : FromLayerOn(first, to->num_layers), to);
  };
  const auto write = [used_if_absent](const GptConfig& from, Json* to) {
    const bool used = from.attention_window > 0;
    (*to)["sliding_window"] = used ? Json(from.attention_window) : Json();
    if (to->contains("use_sliding_window") || (used && !used_if_absent)) (*to)["use_sliding_window"] = used;
    if (to->contains("layer_types") || !from.window_attn_skip_freq.empty()) (*to)["layer_types"] = LayerTypeNames(from);
    if (to->contains("max_window_layers") && !to->contains("layer_types"))
      (*to)["max_window_layers"] = used ? 0 : from.num_layers;
  };
  return CustomKey({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}, read, write);
}

ConfigKey LayerTypesKey(int64_t window_if_absent, int64_t period, bool rope_with_window_only) {
  const auto read = [=](ConfigReader* from, GptConfig* to) {
    const int64_t window = from->Int("sliding_window", &window_if_absent);
    const char* const pattern = from->Has("sliding_window_pattern") ? "sliding_window_pattern" : "_sliding_window_pattern";
    std::vector<int64_t> windowed;
    if (from->Has("layer_types")) {
      windowed = LayerTypes(from, *to);
    } else {
      const int64_t every = std::max<int64_t>(1, from->Int(pattern, &period));
      for (int64_t i = 0; i < to->num_layers; ++i) windowed.push_back((i + 1) % every != 0);
    }
    SetWindow(window, windowed, to);
    const bool hybrid = window > 0 && std::find(windowed.begin(), windowed.end(), 0) != windowed.end();
    if (!rope_with_window_only || !hybrid) return;
    for (int64_t flag : windowed) to->no_rope_freq.push_back(1 - flag);
  };
  const auto write = [=](const GptConfig& from, Json* to) {
    const int64_t window = from.attention_window > 0 || from.no_rope_freq.empty() ? from.attention_window : 4096;
    (*to)["sliding_window"] = window > 0 ? Json(window) : Json();
    (*to)["layer_types"] = LayerTypeNames(from);
  };
  return CustomKey({"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}, read, write);
}

ConfigKey AttentionBiasKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool none = false;
    to->add_qkv_bias = to->add_attention_output_bias = from->Flag("attention_bias", &none);
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["attention_bias"] = from.add_attention_output_bias; };
  return CustomKey({"attention_bias"}, read, write);
}

ConfigKey LinearBiasKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool none = false;
    const bool attention = from->Flag("attention_bias", &none), mlp = from->Flag("mlp_bias", &none);
    to->add_bias_linear = attention && mlp;
    to->add_qkv_bias = to->add_attention_output_bias = attention && !mlp;
    to->add_mlp_bias = mlp && !attention;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["attention_bias"] = from.add_bias_linear || from.add_attention_output_bias;
    (*to)["mlp_bias"] = from.add_bias_linear || from.add_mlp_bias;
  };
  return CustomKey({"attention_bias", "mlp_bias"}, read, write);
}

ConfigKey ActivationKey(std::string name, std::vector<std::pair<std::string, ActivationKind>> kinds) {
  const auto read = [name, kinds](ConfigReader* from, GptConfig* to) {
    const std::string word = from->Text(name, kinds.front().first);
    std::string supported;
    for (const auto& [known, kind] : kinds) {
      supported += (supported.empty() ? "" : " or ") + known;
      if (word != known) continue;
      to->activation = kind;
      // The exact forms: Megatron-LM's fused kernel knows the tanh approximation only.
      if (kind == ActivationKind::kGelu || kind == ActivationKind::kGeglu) to->bias_activation_fusion = false;
      return;
    }
    from->Unsupported(name, supported);
  };
  const auto write = [name, kinds = std::move(kinds)](const GptConfig& from, Json* to) {
    for (const auto& [known, kind] : kinds) {
      if (kind != from.activation) continue;
      (*to)[name] = known;
      return;
    }
  };
  return CustomKey({std::move(name)}, read, write);
}

ConfigKey CommonFreeKeys() {
  return FreeKeys({"_name_or_path",
                   "_attn_implementation",
                   "_attn_implementation_autoset",
                   "architectures",
                   "attn_implementation",
                   "auto_map",
                   "bos_token_id",
                   "chunk_size_feed_forward",
                   "dtype",
                   "eos_token_id",
                   "id2label",
                   "is_decoder",
                   "label2id",
                   "model_type",
                   "num_logits_to_keep",
                   "output_attentions",
                   "output_hidden_states",
                   "output_router_logits",
                   "pad_token_id",
                   "pretraining_tp",
                   "problem_type",
                   "quantization_config",
                   "return_dict",
                   "task_specific_params",
                   "tokenizer_class",
                   "torch_dtype",
                   "transformers_version",
                   "unsloth_fixed",
                   "use_bfloat16",
                   "use_cache"});
}

std::vector<ConfigKey> JoinKeys(std::initializer_list<std::vector<ConfigKey>> lists) {
  std::vector<ConfigKey> all;
  for (const std::vector<ConfigKey>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace mbridge
