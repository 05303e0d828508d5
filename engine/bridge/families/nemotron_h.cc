// Nemotron-H: layers of one block each, a Mamba-2 mixer, attention without positions or an MLP of squared ReLU.
#include <algorithm>

#include "engine/bridge/families/families.h"
#include "engine/bridge/families/mamba_parts.h"

namespace mbridge {
namespace {

struct BlockName {
  MixerKind mixer;
  const char* name;
  const char* old_name;
  char letter;
};
constexpr BlockName kBlocks[] = {{MixerKind::kMamba2, "linear_attention", "mamba", 'M'},
                                 {MixerKind::kAttention, "full_attention", "attention", '*'},
                                 {MixerKind::kNone, "mlp", "mlp", '-'}};

const BlockName* FindBlock(const Json& name) {
  for (const BlockName& block : kBlocks) {
    if (name == block.name || name == block.old_name || name == std::string(1, block.letter)) return &block;
  }
  return nullptr;
}

// layers_block_type, in older files hybrid_override_pattern with a letter for each layer.
ConfigKey BlocksKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const bool listed = from->Has("layers_block_type");
    const char* const key = listed ? "layers_block_type" : "hybrid_override_pattern";
    Json blocks = from->Get(key);
    if (blocks.is_string() && !listed) {
      const auto pattern = blocks.get<std::string>();
      blocks = Json::array();
      for (const char letter : pattern) blocks.push_back(std::string(1, letter));
    }
    if (!blocks.is_array()) {
      from->Unsupported(key, "a list of linear_attention, full_attention and mlp");
      return;
    }
    for (const Json& name : blocks) {
      const BlockName* block = FindBlock(name);
      if (block == nullptr) {
        from->Unsupported(key, "linear_attention (M), full_attention (*) and mlp (-)");
        return;
      }
      to->mixers.push_back(block->mixer);
      to->mlp_layer_freq.push_back(block->mixer == MixerKind::kNone ? 1 : 0);
    }
    const auto count = static_cast<int64_t>(to->mixers.size());
    to->num_layers = from->Int("num_hidden_layers", &count);
    if (to->num_layers != count) from->Unsupported("num_hidden_layers", std::to_string(count) + ", as in " + key);
  };
  const auto write = [](const GptConfig& from, Json* to) {
    Json names = Json::array();
    std::string pattern;
    for (const MixerKind mixer : from.mixers) {
      for (const BlockName& block : kBlocks) {
        if (block.mixer != mixer) continue;
        names.push_back(block.name);
        pattern += block.letter;
      }
    }
    if (to->contains("hybrid_override_pattern")) {
      (*to)["hybrid_override_pattern"] = pattern;
    } else {
      (*to)["layers_block_type"] = names;
    }
    if (to->contains("num_hidden_layers")) (*to)["num_hidden_layers"] = from.num_layers;
  };
  return CustomKey({"layers_block_type", "hybrid_override_pattern", "num_hidden_layers"}, read, write);
}

// head_dim, in older files attention_head_dim.
ConfigKey HeadSizeKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t absent = 128, old = from->Int("attention_head_dim", &absent);
    to->kv_channels = from->Int("head_dim", &old);
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)[to->contains("attention_head_dim") && !to->contains("head_dim") ? "attention_head_dim" : "head_dim"] = from.kv_channels;
  };
  return CustomKey({"head_dim", "attention_head_dim"}, read, write);
}

// time_step_min: transformers bounds the time step by it (its kernels for GPUs do not). After TimeStepLimitKey.
ConfigKey LeastTimeStepKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const double absent = 0.001;
    to->mamba_dt_min = std::max(to->mamba_dt_min, from->Real("time_step_min", &absent));
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["time_step_min"] = from.mamba_dt_min; };
  return CustomKey({"time_step_min"}, read, write);
}

std::vector<TensorRule> Tensors() {
  const std::string ours = "decoder.layers.{layer}.", layer = "layers.{layer}.", mixer = layer + "mixer.";
  std::vector<TensorRule> rules = MambaTensors("backbone." + mixer, "model." + mixer);
  const auto add = [&rules](const std::string& name, const std::vector<std::string>& theirs, RowOrder order, bool vocabulary) {
    TensorRule rule{.ours = name, .theirs = {}, .order = order, .vocabulary = vocabulary};
    for (const std::string& their : theirs) {
      rule.theirs.push_back("backbone." + their);
      rule.runtime.push_back("model." + their);
    }
    rules.push_back(std::move(rule));
  };
  for (const char* norm : {"norm", "input_layernorm", "pre_mlp_layernorm"})
    add(ours + norm + ".weight", {layer + "norm.weight"}, nullptr, false);
  add(ours + "self_attention.linear_qkv.weight", {mixer + "q_proj.weight", mixer + "k_proj.weight", mixer + "v_proj.weight"},
      QkvRows, false);
  add(ours + "self_attention.linear_proj.weight", {mixer + "o_proj.weight"}, nullptr, false);
  for (const char* kind : {"weight", "bias"}) {
    add(ours + "mlp.linear_fc1." + kind, {mixer + "up_proj." + kind}, nullptr, false);
    add(ours + "mlp.linear_fc2." + kind, {mixer + "down_proj." + kind}, nullptr, false);
  }
  add("embedding.word_embeddings.weight", {"embeddings.weight"}, nullptr, true);
  add("decoder.final_layernorm.weight", {"norm_f.weight"}, nullptr, false);
  rules.push_back({.ours = "output_layer.weight", .theirs = {"lm_head.weight"}, .vocabulary = true});
  return rules;
}

}  // namespace

const Architecture& NemotronHArchitecture() {
  static const Architecture kNemotronH = {
      .model_type = "nemotron_h",
      .class_name = "NemotronHForCausalLM",
      .parts = {.normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSquaredRelu,
                .position_embedding = PositionKind::kNone,
                .add_bias_linear = false,
                .tied_embeddings = false},
      .keys = {IntKey("vocab_size", &GptConfig::padded_vocab_size), IntKey("hidden_size", &GptConfig::hidden_size), BlocksKey(),
               IntKey("num_attention_heads", &GptConfig::num_attention_heads),
               IntKey("num_key_value_heads", &GptConfig::num_query_groups, [](const GptConfig&) { return 8; }), HeadSizeKey(),
               IntKey("intermediate_size", &GptConfig::ffn_hidden_size),
               IntKey("max_position_embeddings", &GptConfig::max_position_embeddings, [](const GptConfig&) { return 4096; }),
               IntKey("ssm_state_size", &GptConfig::mamba_state_dim, [](const GptConfig&) { return 128; }),
               IntKey("mamba_head_dim", &GptConfig::mamba_head_dim, [](const GptConfig&) { return 64; }),
               IntKey("mamba_num_heads", &GptConfig::mamba_num_heads, [](const GptConfig&) { return 128; }),
               IntKey("n_groups", &GptConfig::mamba_num_groups, [](const GptConfig&) { return 8; }),
               IntKey("conv_kernel", &GptConfig::mamba_conv_kernel, [](const GptConfig&) { return 4; }),
               RealKey("layer_norm_epsilon", &GptConfig::layernorm_epsilon, 1e-5),
               RealKey("initializer_range", &GptConfig::init_method_std, 0.02),
               RealKey("attention_dropout", &GptConfig::attention_dropout, 0.0),
               FlagKey("use_conv_bias", &GptConfig::mamba_conv_bias, true), OnlyKey("tie_word_embeddings", false),
               OnlyKey("use_bias", false), OnlyKey("attention_bias", false), FlagKey("mlp_bias", &GptConfig::add_mlp_bias, false),
               OnlyKey("mamba_proj_bias", false), OnlyKey("mlp_hidden_act", "relu2"), OnlyKey("mamba_hidden_act", "silu"),
               OnlyKey("sliding_window", Json()), OnlyKey("num_nextn_predict_layers", 0), TimeStepLimitKey(), LeastTimeStepKey(),
               MambaFreeKeys(),
               // Of the blocks of experts, which BlocksKey refuses, and unused ones.
               FreeKeys({"expand", "hidden_dropout", "moe_intermediate_size", "moe_latent_size",
                         "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mtp_layers_block_type", "n_group",
                         "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor",
                         "topk_group"})},
      .tensors = Tensors(),
      .unused = {}};
  return kNemotronH;
}

}  // namespace mbridge
