#include "engine/bridge/architecture.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/config_form.h"
#include "engine/core/error.h"
#include "engine/model/gpt_model.h"

namespace mbridge {
namespace {

absl::Status UnsupportedModel(const std::string& message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL, message);
}

bool IsFor(const Architecture& architecture, const std::string& model_type) {
  return architecture.model_type == model_type ||
         std::find(architecture.accepts.begin(), architecture.accepts.end(), model_type) != architecture.accepts.end();
}

std::string KnownTypes() {
  std::vector<std::string> types;
  for (const Architecture* architecture : Architectures()) types.push_back(architecture->model_type);
  std::sort(types.begin(), types.end());
  return absl::StrJoin(types, ", ");
}

}  // namespace

absl::StatusOr<const Architecture*> FindArchitecture(const std::string& model_type) {
  for (const Architecture* architecture : Architectures()) {
    if (IsFor(*architecture, model_type)) return architecture;
  }
  return UnsupportedModel(fmt::format("model_type \"{}\" is not supported: known are {}", model_type, KnownTypes()));
}

absl::StatusOr<const Architecture*> ArchitectureOf(const Json& config) {
  const Json type = config.is_object() ? config.value("model_type", Json()) : Json();
  if (type.is_string()) return FindArchitecture(type.get<std::string>());
  return UnsupportedModel(fmt::format("config.json has no model_type: known are {}", KnownTypes()));
}

absl::StatusOr<GptConfig> ReadModelConfig(const Architecture& architecture, const Json& config) {
  const Json modern = ModernForm(config);
  ConfigReader reader(modern);
  GptConfig model = architecture.parts;
  model.dtype = DType::kF32;
  model.hidden_dropout = model.attention_dropout = 0.0;
  std::set<std::string> known;
  const auto read = [&](const ConfigKey& key) {
    known.insert(key.names.begin(), key.names.end());
    if (key.read != nullptr) key.read(&reader, &model);
  };
  for (const ConfigKey& key : architecture.keys) read(key);
  read(CommonFreeKeys());
  for (const auto& [name, value] : modern.items()) {
    if (!known.contains(name)) {
      reader.Fault(name, fmt::format("is not known for model_type {}: remove it if it changes nothing", architecture.model_type));
    }
  }
  constexpr int64_t kMostLayers = 100'000;
  if (model.num_layers > kMostLayers)
    reader.Fault("num_hidden_layers", fmt::format("is {}: at most {}", model.num_layers, kMostLayers));
  constexpr int64_t kMostExperts = 10'000;
  if (model.num_moe_experts > kMostExperts) {
    reader.Fault("experts", fmt::format("of a layer are {}: at most {}", model.num_moe_experts, kMostExperts));
  }
  MB_RETURN_IF_ERROR(reader.status());
  model.seq_length = model.max_position_embeddings;
  return model;
}

namespace {

// The numbers of rotary scalings that are off mean nothing.
void ForgetUnusedScaling(GptConfig* config) {
  const GptConfig none;
  if (!config->rope_scaling) {
    config->rope_scaling_factor = none.rope_scaling_factor;
    config->rope_low_freq_factor = none.rope_low_freq_factor;
    config->rope_high_freq_factor = none.rope_high_freq_factor;
  }
  if (config->yarn_rotary_scaling_factor == 0) {
    config->yarn_beta_fast = none.yarn_beta_fast;
    config->yarn_beta_slow = none.yarn_beta_slow;
    config->yarn_correction_range_round_to_int = none.yarn_correction_range_round_to_int;
  }
  if (!config->rope_scaling && config->rope_dynamic_factor == 0 && config->yarn_rotary_scaling_factor == 0 &&
      config->long_rope_short_factors.empty()) {
    config->rope_original_length = none.rope_original_length;
  }
}

// The parts of a Mamba-2 mixer and of a gated delta net, as no layer that has one would have them.
void ForgetMixers(bool mamba, bool delta, GptConfig* config) {
  const GptConfig none;
  if (mamba) {
    for (const auto size : {&GptConfig::mamba_state_dim, &GptConfig::mamba_head_dim, &GptConfig::mamba_num_groups,
                            &GptConfig::mamba_num_heads, &GptConfig::mamba_conv_kernel, &GptConfig::mamba_norm_groups}) {
      config->*size = none.*size;
    }
    config->mamba_conv_bias = none.mamba_conv_bias;
    config->mamba_rms_norm = none.mamba_rms_norm;
    config->mamba_norm_before_gate = none.mamba_norm_before_gate;
    config->mamba_dt_min = config->mamba_dt_max = 0;
  }
  if (!delta) return;
  for (const auto size : {&GptConfig::linear_conv_kernel_dim, &GptConfig::linear_key_head_dim, &GptConfig::linear_value_head_dim,
                          &GptConfig::linear_num_key_heads, &GptConfig::linear_num_value_heads}) {
    config->*size = none.*size;
  }
}

// Sizes of what no layer has mean nothing, and neither do lists that say of every layer what holds without them.
void ForgetAbsentBlocks(GptConfig* config) {
  if (CountLayers(*config, HasAttention) == 0) config->num_attention_heads = config->num_query_groups = config->kv_channels = 0;
  if (CountLayers(*config, HasMlp) == CountLayers(*config, IsMoeLayer)) config->ffn_hidden_size = 0;
  if (!config->mamba_rms_norm || config->mamba_norm_groups == config->mamba_num_groups) config->mamba_norm_groups = 0;
  ForgetMixers(CountLayers(*config, HasMamba) == 0, CountLayers(*config, HasGatedDelta) == 0, config);
  const auto& mixers = config->mixers;
  if (std::all_of(mixers.begin(), mixers.end(), [](MixerKind kind) { return kind == MixerKind::kAttention; }))
    config->mixers.clear();
  const auto& mlps = config->mlp_layer_freq;
  if (std::all_of(mlps.begin(), mlps.end(), [](int64_t flag) { return flag == 1; })) config->mlp_layer_freq.clear();
}

}  // namespace

GptConfig ModelShape(GptConfig config) {
  const GptConfig none;
  config.seq_length = 0;
  config.padded_vocab_size = 0;
  config.hidden_dropout = config.attention_dropout = 0.0;
  config.init_method_std = none.init_method_std;
  config.output_init_std = config.embedding_init_std = 0.0;
  config.moe_load_balancing = none.moe_load_balancing;
  config.moe_aux_loss_coeff = config.moe_z_loss_coeff = 0.0;
  config.moe_router_bias_update_rate = none.moe_router_bias_update_rate;
  config.moe_router_fp32 = none.moe_router_fp32;
  config.dtype = none.dtype;
  config.bias_activation_fusion = none.bias_activation_fusion;
  config.bias_dropout_fusion = none.bias_dropout_fusion;
  config.attention_softmax_in_fp32 = none.attention_softmax_in_fp32;
  config.cross_entropy_loss_fusion = none.cross_entropy_loss_fusion;
  config.sequence_parallel = false;
  ForgetUnusedScaling(&config);
  ForgetAbsentBlocks(&config);
  // A rotation works at any length; the number is then only what config.json advertises.
  if (config.position_embedding != PositionKind::kLearnedAbsolute) config.max_position_embeddings = 0;
  return config;
}

absl::StatusOr<Json> WriteModelConfig(const Architecture& architecture, const GptConfig& config, int64_t vocab_size,
                                      const Json& source) {
  GptConfig theirs = config;
  theirs.padded_vocab_size = vocab_size;
  const bool has_source = source.is_object() && !source.empty();
  if (has_source) {
    const absl::StatusOr<GptConfig> meant = ReadModelConfig(architecture, source);
    if (meant.ok() && meant->padded_vocab_size == vocab_size && ModelShape(*meant) == ModelShape(theirs)) return source;
  }
  Json modern = has_source ? ModernForm(source)
                           : Json{{"architectures", {architecture.class_name}}, {"model_type", architecture.model_type}};
  if (theirs.max_position_embeddings == 0) theirs.max_position_embeddings = theirs.seq_length;
  for (const ConfigKey& key : architecture.keys) {
    if (key.write != nullptr) key.write(theirs, &modern);
  }
  MB_ASSIGN_OR_RETURN(const GptConfig meant, ReadModelConfig(architecture, modern));
  if (!(ModelShape(meant) == ModelShape(theirs))) {
    return UnsupportedModel(fmt::format(
        "a config.json of model_type {} cannot describe this model: it has parts of another family", architecture.model_type));
  }
  return has_source ? InFormOf(source, modern) : modern;
}

absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const GptConfig& config) {
  try {
    GptModel model(config, nullptr);
    ParameterStore store(config.dtype, DeviceType::kCpu);
    model.DeclareParameters(&store);
    std::vector<ParameterSpec> specs;
    for (const Parameter& parameter : store.parameters()) specs.push_back(parameter.spec);
    return specs;
  } catch (const EngineError& error) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, error.reason(), error.what());
  }
}

absl::StatusOr<std::vector<TensorMapping>> MapModel(const Architecture& architecture, const GptConfig& config,
                                                    const std::vector<ParameterSpec>& parameters, int64_t vocab_size,
                                                    bool runtime) {
  std::vector<const TensorRule*> rules;
  std::vector<std::string> missing;
  MapOptions options{.vocab_size = vocab_size, .experts = 0, .runtime = runtime};
  for (const ParameterSpec& parameter : parameters) {
    const TensorRule* found = nullptr;
    for (const TensorRule& rule : architecture.tensors) {
      const std::optional<Placeholders> values = MatchName(rule.ours, parameter.name);
      if (!values) continue;
      found = &rule;
      if (const auto expert = values->find("expert"); expert != values->end()) {
        options.experts = std::max(options.experts, expert->second + 1);
      }
      break;
    }
    if (found == nullptr) missing.push_back(parameter.name);
    rules.push_back(found);
  }
  if (!missing.empty()) {
    return UnsupportedModel(
        fmt::format("checkpoints of model_type {} have no place for {}", architecture.model_type, absl::StrJoin(missing, ", ")));
  }
  std::vector<TensorMapping> mappings;
  for (size_t i = 0; i < parameters.size(); ++i) {
    MB_ASSIGN_OR_RETURN(TensorMapping mapping,
                        MapTensor(*rules[i], parameters[i].name, parameters[i].global_shape, config, options));
    mappings.push_back(std::move(mapping));
  }
  return mappings;
}

void RemovePrefix(const Architecture& architecture, std::vector<TensorMapping>* mappings) {
  for (TensorMapping& mapping : *mappings) {
    for (TheirTensor& tensor : mapping.theirs) {
      if (tensor.name.starts_with(architecture.prefix)) tensor.name.erase(0, architecture.prefix.size());
    }
  }
}

bool LacksPrefix(const Architecture& architecture, const std::vector<std::string>& names) {
  return !names.empty() &&
         std::none_of(names.begin(), names.end(), [&](const std::string& name) { return name.starts_with(architecture.prefix); });
}

ExtraTensor ClassifyExtra(const Architecture& architecture, const std::string& name) {
  const std::string whole = architecture.prefix + name;  // Of a file without the prefix.
  const auto fits = [&](const std::string& pattern) { return MatchName(pattern, name) || MatchName(pattern, whole); };
  if (std::any_of(architecture.unused.begin(), architecture.unused.end(), fits)) return ExtraTensor::kUnused;
  for (const TensorRule& rule : architecture.tensors) {
    if (std::any_of(rule.theirs.begin(), rule.theirs.end(), fits)) return ExtraTensor::kDenied;
  }
  return ExtraTensor::kUnknown;
}

}  // namespace mbridge
