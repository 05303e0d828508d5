#include "engine/megatron/model_arguments.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using Kind = PickleValue::Kind;

struct Argument {
  const char* name;
  std::variant<int64_t GptConfig::*, double GptConfig::*, bool GptConfig::*> field;
};

// Arguments that mean what the field of GptConfig means. Absent ones leave the field's own default.
constexpr Argument kArguments[] = {
    {"num_layers", &GptConfig::num_layers},
    {"hidden_size", &GptConfig::hidden_size},
    {"num_attention_heads", &GptConfig::num_attention_heads},
    {"seq_length", &GptConfig::seq_length},
    {"max_position_embeddings", &GptConfig::max_position_embeddings},
    {"padded_vocab_size", &GptConfig::padded_vocab_size},
    {"add_bias_linear", &GptConfig::add_bias_linear},
    {"add_qkv_bias", &GptConfig::add_qkv_bias},
    {"qk_layernorm", &GptConfig::qk_layernorm},
    {"apply_layernorm_1p", &GptConfig::layernorm_zero_centered_gamma},
    {"norm_epsilon", &GptConfig::layernorm_epsilon},
    {"rotary_base", &GptConfig::rotary_base},
    {"rotary_percent", &GptConfig::rotary_percent},
    {"rotary_interleaved", &GptConfig::rotary_interleaved},
    {"rotary_seq_len_interpolation_factor", &GptConfig::seq_len_interpolation_factor},
    {"use_rope_scaling", &GptConfig::rope_scaling},
    {"rope_scaling_factor", &GptConfig::rope_scaling_factor},
    {"hidden_dropout", &GptConfig::hidden_dropout},
    {"attention_dropout", &GptConfig::attention_dropout},
    {"init_method_std", &GptConfig::init_method_std},
    {"attention_softmax_in_fp32", &GptConfig::attention_softmax_in_fp32},
    {"bias_dropout_fusion", &GptConfig::bias_dropout_fusion},
    {"cross_entropy_loss_fusion", &GptConfig::cross_entropy_loss_fusion},
    {"multi_latent_attention", &GptConfig::multi_latent_attention},
};
constexpr Argument kLatentArguments[] = {
    {"q_lora_rank", &GptConfig::q_lora_rank}, {"kv_lora_rank", &GptConfig::kv_lora_rank},
    {"qk_head_dim", &GptConfig::qk_head_dim}, {"qk_pos_emb_head_dim", &GptConfig::qk_pos_emb_head_dim},
    {"v_head_dim", &GptConfig::v_head_dim},
};
constexpr Argument kYarnArguments[] = {
    {"rotary_scaling_factor", &GptConfig::yarn_rotary_scaling_factor},
    {"original_max_position_embeddings", &GptConfig::rope_original_length},
    {"beta_fast", &GptConfig::yarn_beta_fast},
    {"beta_slow", &GptConfig::yarn_beta_slow},
    {"mscale_all_dim", &GptConfig::mscale_all_dim},
};
constexpr Argument kExpertArguments[] = {
    {"moe_shared_expert_intermediate_size", &GptConfig::moe_shared_expert_intermediate_size},
    {"moe_shared_expert_gate", &GptConfig::moe_shared_expert_gate},
    {"moe_router_topk", &GptConfig::moe_router_topk},
    {"moe_router_num_groups", &GptConfig::moe_router_num_groups},
    {"moe_router_group_topk", &GptConfig::moe_router_group_topk},
    {"moe_router_topk_scaling_factor", &GptConfig::moe_router_topk_scaling_factor},
    {"moe_router_enable_expert_bias", &GptConfig::moe_router_enable_expert_bias},
    {"moe_router_bias_update_rate", &GptConfig::moe_router_bias_update_rate},
    {"moe_z_loss_coeff", &GptConfig::moe_z_loss_coeff},
    {"activation_func_clamp_value", &GptConfig::activation_clamp},
    {"glu_linear_offset", &GptConfig::glu_linear_offset},
};

// Arguments of models that the engine does not build; each must be absent, None, False or 0.
constexpr const char* kRefused[] = {"attention_output_gate",
                                    "experimental_attention_variant",
                                    "linear_attention_freq",
                                    "linear_attention_type",
                                    "heterogeneous_layers_config_path",
                                    "heterogeneous_layers_config_encoded_json",
                                    "hybrid_override_pattern",
                                    "hybrid_layer_pattern",
                                    "retro_add_retriever",
                                    "moe_latent_size",
                                    "qk_l2_norm",
                                    "no_rope_freq",
                                    "scale_embeddings",
                                    "moe_apply_probs_on_input",
                                    "group_limited_gate"};

class Reader {
 public:
  explicit Reader(const PickleValue& arguments) : arguments_(arguments) {}

  // Null for None and for what is not there.
  const PickleValue* Get(const char* name) const {
    const PickleValue* value = arguments_.Find(name);
    return value == nullptr || value->Is(Kind::kNone) ? nullptr : value;
  }
  void Fault(const char* name, std::string what) { faults_.push_back({fmt::format("args.{}", name), std::move(what)}); }

  bool Flag(const char* name, bool absent = false) {
    const PickleValue* value = Get(name);
    if (value == nullptr) return absent;
    if (value->Is(Kind::kBool) || value->Is(Kind::kInt)) return value->integer != 0;
    Fault(name, "is not true or false");
    return absent;
  }
  int64_t Int(const char* name, int64_t absent) {
    const PickleValue* value = Get(name);
    if (value == nullptr) return absent;
    if (value->Is(Kind::kInt)) return value->integer;
    Fault(name, "is not a whole number");
    return absent;
  }
  double Real(const char* name, double absent) {
    const PickleValue* value = Get(name);
    if (value == nullptr) return absent;
    if (value->Is(Kind::kFloat)) return value->real;
    if (value->Is(Kind::kInt)) return static_cast<double>(value->integer);
    Fault(name, "is not a number");
    return absent;
  }
  std::string Text(const char* name, const std::string& absent) {
    const PickleValue* value = Get(name);
    if (value == nullptr) return absent;
    if (value->Is(Kind::kText)) return value->text;
    Fault(name, "is not a text");
    return absent;
  }
  template <size_t N> void Take(const Argument (&arguments)[N], GptConfig* config) {
    for (const Argument& argument : arguments) {
      std::visit(
          [&](auto field) {
            using Value = std::remove_reference_t<decltype(config->*field)>;
            if constexpr (std::is_same_v<Value, bool>) {
              config->*field = Flag(argument.name, config->*field);
            } else if constexpr (std::is_same_v<Value, double>) {
              config->*field = Real(argument.name, config->*field);
            } else {
              config->*field = Int(argument.name, config->*field);
            }
          },
          argument.field);
    }
  }
  absl::Status status() const {
    return faults_.empty() ? absl::OkStatus() : InvalidFields(v1::REASON_UNSUPPORTED_MODEL, faults_);
  }

 private:
  const PickleValue& arguments_;
  std::vector<FieldViolation> faults_;
};

void ReadParts(Reader& reader, GptConfig* config) {
  const std::string norm = reader.Text("normalization", "LayerNorm");
  if (norm != "LayerNorm" && norm != "RMSNorm") reader.Fault("normalization", fmt::format("is {}: LayerNorm or RMSNorm", norm));
  config->normalization = norm == "RMSNorm" ? NormKind::kRmsNorm : NormKind::kLayerNorm;
  const bool swiglu = reader.Flag("swiglu"), squared = reader.Flag("squared_relu"), quick = reader.Flag("quick_geglu"),
             tanh = reader.Flag("openai_gelu");
  config->activation = swiglu    ? ActivationKind::kSwiGlu
                       : squared ? ActivationKind::kSquaredRelu
                       : quick   ? ActivationKind::kQuickGeglu
                       : tanh    ? ActivationKind::kGeluTanh
                                 : ActivationKind::kGelu;
  config->bias_activation_fusion =
      swiglu ? reader.Flag("bias_swiglu_fusion", true) : reader.Flag("bias_gelu_fusion", config->add_bias_linear);
  std::string position = reader.Text("position_embedding_type", "learned_absolute");
  if (reader.Flag("use_rotary_position_embeddings")) position = "rope";
  if (position == "learned_absolute") {
    config->position_embedding = PositionKind::kLearnedAbsolute;
  } else if (position == "rope") {
    config->position_embedding = PositionKind::kRope;
  } else if (position == "none") {
    config->position_embedding = PositionKind::kNone;
  } else {
    reader.Fault("position_embedding_type", fmt::format("is {}: learned_absolute, rope or none", position));
  }
  config->tied_embeddings = !reader.Flag("untie_embeddings_and_output_weights");
  config->num_query_groups =
      reader.Flag("group_query_attention") ? reader.Int("num_query_groups", 1) : config->num_attention_heads;
  if (config->num_attention_heads > 0 && config->hidden_size > 0)
    config->kv_channels = reader.Int("kv_channels", config->hidden_size / config->num_attention_heads);
  const int64_t width = 4 * config->hidden_size;
  config->ffn_hidden_size = reader.Int("ffn_hidden_size", swiglu ? width * 2 / 3 / 64 * 64 : width);
  const std::string softmax = reader.Text("softmax_type", "vanilla");
  if (softmax != "vanilla" && softmax != "learnable")
    reader.Fault("softmax_type", fmt::format("is {}: vanilla or learnable", softmax));
  config->attention_sinks = softmax == "learnable";
  if (const PickleValue* window = reader.Get("window_size"); window != nullptr) {
    if (!window->IsSequence() || window->items.size() != 2 || !window->items[0]->Is(Kind::kInt) ||
        window->items[0]->integer < 0) {
      reader.Fault("window_size", "is not a pair of whole numbers");
    } else {
      config->attention_window = window->items[0]->integer + 1;
    }
  }
}

// A number N, or a flag for each layer.
void ReadPattern(Reader& reader, const char* name, int64_t layers, bool first_of_n, std::vector<int64_t>* pattern) {
  const PickleValue* value = reader.Get(name);
  if (value == nullptr || layers > 100'000) return;
  if (value->Is(Kind::kInt)) {
    const int64_t n = value->integer;
    if (n < 1) return reader.Fault(name, "is below 1");
    if (first_of_n && n == 1) return;  // All of them.
    for (int64_t i = 0; i < layers; ++i) pattern->push_back(first_of_n ? i % n == 0 : (i + 1) % n != 0);
    return;
  }
  bool flags = value->IsSequence() && static_cast<int64_t>(value->items.size()) == layers;
  for (size_t i = 0; flags && i < value->items.size(); ++i) {
    const PickleValue& item = *value->items[i];
    flags = (item.Is(Kind::kInt) || item.Is(Kind::kBool)) && (item.integer == 0 || item.integer == 1);
    if (flags) pattern->push_back(item.integer);
  }
  if (!flags) reader.Fault(name, "is neither a number nor a list of a 0 or 1 for each layer");
}

void ReadLatent(Reader& reader, GptConfig* config) {
  config->kv_lora_rank = 32;
  config->qk_head_dim = config->v_head_dim = 128;
  config->qk_pos_emb_head_dim = 64;
  reader.Take(kLatentArguments, config);
  config->kv_channels = config->qk_head_dim + config->qk_pos_emb_head_dim;
  config->num_query_groups = config->num_attention_heads;
  config->position_embedding = PositionKind::kRope;
  config->rotary_interleaved = true;  // Multi-latent attention knows no other pairs.
  if (!config->qk_layernorm) reader.Fault("qk_layernorm", "is false with multi_latent_attention");
  config->qk_layernorm = false;  // The norms of the latent vectors are part of the attention.
  const double factor = reader.Real("rotary_scaling_factor", 1.0);
  if (factor <= 1) return;
  if (reader.Text("rope_type", "yarn") != "yarn") {
    // Megatron-Core scales the scores by both, whichever positions there are.
    if (reader.Real("mscale_all_dim", 0) != 0)
      reader.Fault("mscale_all_dim", "is set with rotary_scaling_factor, but rope_type is not yarn");
    return;
  }
  config->rope_original_length = 4096;
  reader.Take(kYarnArguments, config);
  const auto scale = [&](double mscale) { return 0.1 * mscale * std::log(factor) + 1.0; };
  config->rope_attention_factor = scale(reader.Real("mscale", 1.0)) / scale(config->mscale_all_dim);
}

void ReadExperts(Reader& reader, GptConfig* config) {
  config->num_moe_experts = reader.Int("num_experts", 0);
  if (config->num_moe_experts == 0) return;
  reader.Take(kExpertArguments, config);
  ReadPattern(reader, "moe_layer_freq", config->num_layers, true, &config->moe_layer_freq);
  config->moe_ffn_hidden_size = reader.Int("moe_ffn_hidden_size", config->ffn_hidden_size);
  const std::string score = reader.Text("moe_router_score_function", "softmax");
  if (score != "softmax" && score != "sigmoid")
    reader.Fault("moe_router_score_function", fmt::format("is {}: softmax or sigmoid", score));
  config->moe_router_score = score == "sigmoid"                      ? RouterScore::kSigmoid
                             : reader.Flag("moe_router_pre_softmax") ? RouterScore::kSoftmax
                                                                     : RouterScore::kSoftmaxOfChosen;
  const std::string dtype = reader.Text("moe_router_dtype", "");
  if (dtype == "fp64") reader.Fault("moe_router_dtype", "is fp64: fp32 or none");
  config->moe_router_fp32 = dtype == "fp32";
  // Several kinds may be given as a list, with a list of coefficients; what the model computes does not depend on them.
  const PickleValue* balancing = reader.Get("moe_router_load_balancing_type");
  config->moe_load_balancing = LoadBalancing::kNone;
  if (balancing == nullptr || !balancing->Is(Kind::kText)) return;
  if (balancing->text == "aux_loss") config->moe_load_balancing = LoadBalancing::kBatch;
  if (balancing->text == "seq_aux_loss") config->moe_load_balancing = LoadBalancing::kSequence;
  const PickleValue* coefficient = reader.Get("moe_aux_loss_coeff");
  if (coefficient != nullptr && !coefficient->IsSequence()) config->moe_aux_loss_coeff = reader.Real("moe_aux_loss_coeff", 0);
}

class Writer {
 public:
  explicit Writer(PickleWriter* pickle) : pickle_(*pickle) {}

  void Text(const char* name, const std::string& value) { pickle_.Text(name).Text(value); }
  void Int(const char* name, int64_t value) { pickle_.Text(name).Int(value); }
  void Real(const char* name, double value) { pickle_.Text(name).Float(value); }
  void Flag(const char* name, bool value) { pickle_.Text(name).Bool(value); }
  void None(const char* name) { pickle_.Text(name).None(); }
  void Flags(const char* name, const std::vector<int64_t>& flags) {
    pickle_.Text(name).BeginList();
    for (const int64_t flag : flags) pickle_.Int(flag);
    pickle_.EndList();
  }
  template <size_t N> void Give(const Argument (&arguments)[N], const GptConfig& config) {
    for (const Argument& argument : arguments) {
      std::visit(
          [&](auto field) {
            using Value = std::remove_cvref_t<decltype(config.*field)>;
            if constexpr (std::is_same_v<Value, bool>) {
              Flag(argument.name, config.*field);
            } else if constexpr (std::is_same_v<Value, double>) {
              WriteReal(argument.name, config.*field);
            } else {
              WriteInt(argument.name, config.*field);
            }
          },
          argument.field);
    }
  }

 private:
  // Zero stands for "not given" where Megatron-LM has None.
  void WriteInt(const std::string& name, int64_t value) {
    const bool none = value == 0 && (name == "q_lora_rank" || name.starts_with("moe_"));
    none ? None(name.c_str()) : Int(name.c_str(), value);
  }
  void WriteReal(const std::string& name, double value) {
    if (name == "rotary_base" && value == std::floor(value)) return Int("rotary_base", static_cast<int64_t>(value));
    const bool none = value == 0 && (name == "rotary_seq_len_interpolation_factor" || name == "activation_func_clamp_value");
    none ? None(name.c_str()) : Real(name.c_str(), value);
  }

  PickleWriter& pickle_;
};

void WriteExperts(const GptConfig& config, Writer& writer) {
  writer.Int("num_experts", config.num_moe_experts);
  writer.Give(kExpertArguments, config);
  if (config.moe_layer_freq.empty()) {
    writer.Int("moe_layer_freq", 1);
  } else {
    writer.Flags("moe_layer_freq", config.moe_layer_freq);
  }
  writer.Int("moe_ffn_hidden_size", config.moe_ffn_hidden_size);
  writer.Text("moe_router_score_function", config.moe_router_score == RouterScore::kSigmoid ? "sigmoid" : "softmax");
  writer.Flag("moe_router_pre_softmax", config.moe_router_score == RouterScore::kSoftmax);
  config.moe_router_fp32 ? writer.Text("moe_router_dtype", "fp32") : writer.None("moe_router_dtype");
  writer.Text("moe_router_load_balancing_type", config.moe_load_balancing == LoadBalancing::kBatch      ? "aux_loss"
                                                : config.moe_load_balancing == LoadBalancing::kSequence ? "seq_aux_loss"
                                                                                                        : "none");
  writer.Real("moe_aux_loss_coeff", config.moe_aux_loss_coeff);
}

}  // namespace

absl::StatusOr<GptConfig> ModelOfArguments(const PickleValue& arguments) {
  Reader reader(arguments);
  GptConfig config;
  for (const char* name : {"num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"}) {
    if (reader.Get(name) == nullptr) reader.Fault(name, "is missing");
  }
  constexpr int64_t kMostLayers = 10'000, kMostExperts = 10'000;
  if (reader.Int("num_layers", 0) > kMostLayers || reader.Int("num_experts", 0) > kMostExperts)
    reader.Fault("num_layers", fmt::format("or num_experts is above {}", kMostLayers));
  for (const char* name : kRefused) {
    const PickleValue* value = reader.Get(name);
    if (value == nullptr || ((value->Is(Kind::kBool) || value->Is(Kind::kInt)) && value->integer == 0)) continue;
    reader.Fault(name, "is set: the engine does not build such models");
  }
  reader.Take(kArguments, &config);
  if (reader.Get("norm_epsilon") == nullptr) config.layernorm_epsilon = reader.Real("layernorm_epsilon", 1e-5);
  if (config.seq_length == 0) config.seq_length = config.max_position_embeddings;
  if (config.max_position_embeddings == 0) config.max_position_embeddings = config.seq_length;
  ReadParts(reader, &config);
  ReadPattern(reader, "window_attn_skip_freq", config.num_layers, false, &config.window_attn_skip_freq);
  if (config.multi_latent_attention) ReadLatent(reader, &config);
  ReadExperts(reader, &config);
  config.dtype = DType::kF32;
  MB_RETURN_IF_ERROR(reader.status());
  return config;
}

void WriteArguments(const GptConfig& config, DType dtype, PickleWriter* pickle) {
  pickle->NewObject("argparse", "Namespace").BeginDict();
  Writer writer(pickle);
  GptConfig shown = config;
  if (config.multi_latent_attention) shown.qk_layernorm = true;
  writer.Give(kArguments, shown);
  writer.Text("normalization", config.normalization == NormKind::kRmsNorm ? "RMSNorm" : "LayerNorm");
  writer.Flag("swiglu", config.activation == ActivationKind::kSwiGlu);
  writer.Flag("squared_relu", config.activation == ActivationKind::kSquaredRelu);
  writer.Flag("quick_geglu", config.activation == ActivationKind::kQuickGeglu);
  writer.Flag("openai_gelu", config.activation == ActivationKind::kGeluTanh);
  writer.Flag("bias_gelu_fusion", config.activation == ActivationKind::kGelu && config.bias_activation_fusion);
  writer.Flag("bias_swiglu_fusion", config.bias_activation_fusion);
  writer.Text("position_embedding_type", config.position_embedding == PositionKind::kLearnedAbsolute ? "learned_absolute"
                                         : config.position_embedding == PositionKind::kRope          ? "rope"
                                                                                                     : "none");
  writer.Flag("add_position_embedding", config.position_embedding == PositionKind::kLearnedAbsolute);
  writer.Flag("use_rotary_position_embeddings", false);
  writer.Flag("untie_embeddings_and_output_weights", !config.tied_embeddings);
  const bool grouped = config.num_query_groups != config.num_attention_heads;
  writer.Flag("group_query_attention", grouped);
  writer.Int("num_query_groups", grouped ? config.num_query_groups : 1);
  writer.Int("kv_channels", config.kv_channels);
  writer.Int("ffn_hidden_size", config.ffn_hidden_size);
  writer.Text("softmax_type", config.attention_sinks ? "learnable" : "vanilla");
  if (config.attention_window > 0) {
    pickle->Text("window_size").BeginTuple().Int(config.attention_window - 1).Int(0).EndTuple();
    if (!config.window_attn_skip_freq.empty()) writer.Flags("window_attn_skip_freq", config.window_attn_skip_freq);
  }
  if (config.multi_latent_attention) {
    writer.Give(kLatentArguments, config);
    const bool yarn = config.yarn_rotary_scaling_factor > 1;
    writer.Text("rope_type", yarn ? "yarn" : "rope");
    if (yarn) {
      GptConfig yarned = config;
      writer.Give(kYarnArguments, yarned);
      const double factor = config.yarn_rotary_scaling_factor;
      const double scale = config.rope_attention_factor * (0.1 * config.mscale_all_dim * std::log(factor) + 1.0);
      writer.Real("mscale", (scale - 1.0) / (0.1 * std::log(factor)));
    }
  }
  if (config.num_moe_experts > 0) {
    WriteExperts(config, writer);
  } else {
    writer.None("num_experts");
  }
  for (const char* size : {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                           "expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size", "world_size"}) {
    writer.Int(size, 1);
  }
  for (const char* count : {"iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"}) {
    writer.Int(count, 0);
  }
  writer.Flag("bf16", dtype == DType::kBF16);
  writer.Flag("fp16", dtype == DType::kF16);
  pickle->Text("params_dtype").Global("torch", dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32");
  pickle->EndDict().SetState();
}

std::vector<std::string> PartsWithoutArgument(const GptConfig& config) {
  std::vector<std::string> parts;
  const auto add = [&](bool has, const char* what) {
    if (has) parts.emplace_back(what);
  };
  const ActivationKind activation = config.activation;
  add(activation == ActivationKind::kGeglu || activation == ActivationKind::kGegluTanh, "gated GELU");
  add(!config.pre_layernorm, "no norms before attention and MLP");
  add(config.post_layernorm, "norms behind attention and MLP");
  add(config.qk_norm_over_projection, "norms over all queries");
  add(config.softmax_scale > 0, "a scale of the attention scores");
  add(config.attn_logit_softcapping > 0 || config.final_logit_softcapping > 0, "soft caps");
  add(config.embedding_multiplier != 1 || config.residual_multiplier != 1 || config.logits_scaling != 1,
      "multipliers of embeddings, residuals or logits");
  add(!config.no_rope_freq.empty(), "layers without rotary positions");
  add(config.rotary_base_local > 0, "a second rotary base");
  add(config.rope_dynamic_factor > 0 || !config.long_rope_long_factors.empty(), "dynamic or long rotary scaling");
  add(config.yarn_rotary_scaling_factor > 0 && !config.multi_latent_attention, "YaRN without multi-latent attention");
  const bool llama3 =
      config.rope_low_freq_factor == 1 && config.rope_high_freq_factor == 4 && config.rope_original_length == 8192;
  add(config.rope_scaling && !llama3, "Llama 3's rotary scaling with other bounds than 1, 4 and 8192");
  add(config.moe_router_group_experts > 0, "a number of experts that a group's score takes");
  return parts;
}

}  // namespace mbridge
