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
  const auto read = [name, field, absent](ConfigReader* from, GptConfig* to) {
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
  if (value.is_number_integer()) return value.get<int64_t>();
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
  key.read = [name, field, absent](ConfigReader* from, GptConfig* to) { to->*field = from->Real(name, &absent); };
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
  const auto write = [name, value](const GptConfig&, Json* to) { (*to)[name] = value; };
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

std::vector<ConfigKey> DecoderKeys() {
  return {IntKey("vocab_size", &GptConfig::padded_vocab_size),
          IntKey("hidden_size", &GptConfig::hidden_size),
          IntKey("num_hidden_layers", &GptConfig::num_layers),
          IntKey("num_attention_heads", &GptConfig::num_attention_heads),
          IntKey("num_key_value_heads", &GptConfig::num_query_groups, [](const GptConfig& c) { return c.num_attention_heads; }),
          IntKey("head_dim", &GptConfig::kv_channels,
                 [](const GptConfig& c) { return c.num_attention_heads > 0 ? c.hidden_size / c.num_attention_heads : 0; }),
          IntKey("intermediate_size", &GptConfig::ffn_hidden_size),
          IntKey("max_position_embeddings", &GptConfig::max_position_embeddings),
          RealKey("initializer_range", &GptConfig::init_method_std, 0.02),
          RealKey("attention_dropout", &GptConfig::attention_dropout, 0.0)};
}

ConfigKey RopeKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const double base = 10000, whole = 1;
    const std::string type = from->Text("rope_parameters/rope_type", "default");
    to->rotary_base = from->Real("rope_parameters/rope_theta", &base);
    to->rotary_percent = from->Real("rope_parameters/partial_rotary_factor", &whole);
    if (type == "linear") {
      to->seq_len_interpolation_factor = from->Real("rope_parameters/factor");
    } else if (type == "llama3") {
      to->rope_scaling = true;
      to->rope_scaling_factor = from->Real("rope_parameters/factor");
      to->rope_low_freq_factor = from->Real("rope_parameters/low_freq_factor");
      to->rope_high_freq_factor = from->Real("rope_parameters/high_freq_factor");
      to->rope_original_length = from->Real("rope_parameters/original_max_position_embeddings");
    } else if (type != "default") {
      from->Unsupported("rope_parameters/rope_type", "default, linear or llama3");
    }
  };
  const auto write = [](const GptConfig& from, Json* to) {
    Json rope = {{"rope_theta", from.rotary_base}, {"rope_type", "default"}};
    if (from.rotary_percent != 1.0) rope["partial_rotary_factor"] = from.rotary_percent;
    if (from.seq_len_interpolation_factor > 0) {
      rope["rope_type"] = "linear";
      rope["factor"] = from.seq_len_interpolation_factor;
    } else if (from.rope_scaling) {
      rope["rope_type"] = "llama3";
      rope["factor"] = from.rope_scaling_factor;
      rope["low_freq_factor"] = from.rope_low_freq_factor;
      rope["high_freq_factor"] = from.rope_high_freq_factor;
      rope["original_max_position_embeddings"] = static_cast<int64_t>(from.rope_original_length);
    }
    (*to)["rope_parameters"] = rope;
  };
  return CustomKey({"rope_parameters", "partial_rotary_factor"}, read, write);
}

ConfigKey SlidingWindowKey(bool used_if_absent) {
  const auto read = [used_if_absent](ConfigReader* from, GptConfig* to) {
    const int64_t none = 0;
    const int64_t window = from->Flag("use_sliding_window", &used_if_absent) ? from->Int("sliding_window", &none) : 0;
    const Json& types = from->Get("layer_types");
    int64_t sliding = 0;
    if (window > 0 && types.is_array()) {
      for (const Json& type : types) sliding += type == "sliding_attention";
    } else if (window > 0) {
      const int64_t first = from->Int("max_window_layers", &none);
      sliding = to->num_layers - std::clamp<int64_t>(first, 0, to->num_layers);
    }
    if (sliding != 0 && sliding != to->num_layers) {
      from->Unsupported(types.is_array() ? "layer_types" : "max_window_layers", "a window in all layers or in none");
    }
    to->attention_window = sliding > 0 ? window : 0;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    const bool used = from.attention_window > 0;
    (*to)["sliding_window"] = used ? Json(from.attention_window) : Json();
    if (to->contains("use_sliding_window")) (*to)["use_sliding_window"] = used;
    if (to->contains("max_window_layers")) (*to)["max_window_layers"] = used ? 0 : from.num_layers;
    if (to->contains("layer_types")) {
      (*to)["layer_types"] = std::vector<std::string>(from.num_layers, used ? "sliding_attention" : "full_attention");
    }
  };
  return CustomKey({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}, read, write);
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
