// Mamba-2: layers of one mixer each, whose output is normalised over its whole width.
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/mamba_parts.h"

namespace mbridge {
namespace {

constexpr int64_t kTrainingLength = 2048;  // config.json tells none.

ConfigKey LayersKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    to->num_layers = from->Int("num_hidden_layers");
    SetLayers(MixerKind::kMamba2, false, to);
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["num_hidden_layers"] = from.num_layers; };
  return CustomKey({"num_hidden_layers"}, read, write);
}

// expand: the mixer's width as a multiple of the hidden size.
ConfigKey ExpandKey() {
  const auto inner = [](const GptConfig& c) { return static_cast<double>(c.mamba_num_heads * c.mamba_head_dim); };
  const auto read = [inner](ConfigReader* from, GptConfig* to) {
    const double absent = 2;
    // What attention would need: there is none.
    to->num_attention_heads = to->num_query_groups = 1;
    to->kv_channels = to->ffn_hidden_size = to->hidden_size;
    if (from->Real("expand", &absent) * static_cast<double>(to->hidden_size) == inner(*to)) return;
    from->Fault("expand", "times hidden_size is another number than num_heads times head_dim");
  };
  const auto write = [inner](const GptConfig& from, Json* to) {
    const double expand = inner(from) / static_cast<double>(from.hidden_size);
    (*to)["expand"] =
        expand == static_cast<double>(static_cast<int64_t>(expand)) ? Json(static_cast<int64_t>(expand)) : Json(expand);
  };
  return CustomKey({"expand"}, read, write);
}

std::vector<TensorRule> Tensors() {
  std::vector<TensorRule> rules = MambaTensors("backbone.layers.{layer}.mixer.");
  rules.push_back({.ours = "embedding.word_embeddings.weight", .theirs = {"backbone.embeddings.weight"}, .vocabulary = true});
  rules.push_back({.ours = "decoder.layers.{layer}.norm.weight", .theirs = {"backbone.layers.{layer}.norm.weight"}});
  rules.push_back({.ours = "decoder.final_layernorm.weight", .theirs = {"backbone.norm_f.weight"}});
  rules.push_back({.ours = "output_layer.weight", .theirs = {"lm_head.weight"}, .vocabulary = true});
  return rules;
}

}  // namespace

const Architecture& Mamba2Architecture() {
  static const Architecture kMamba2 = {
      .model_type = "mamba2",
      .class_name = "Mamba2ForCausalLM",
      .parts = {.max_position_embeddings = kTrainingLength,
                .normalization = NormKind::kRmsNorm,
                .activation = ActivationKind::kSwiGlu,
                .position_embedding = PositionKind::kNone,
                .mamba_norm_groups = 1},
      .keys = {IntKey("vocab_size", &GptConfig::padded_vocab_size), IntKey("hidden_size", &GptConfig::hidden_size), LayersKey(),
               IntKey("state_size", &GptConfig::mamba_state_dim, [](const GptConfig&) { return 128; }),
               IntKey("head_dim", &GptConfig::mamba_head_dim, [](const GptConfig&) { return 64; }),
               IntKey("num_heads", &GptConfig::mamba_num_heads, [](const GptConfig&) { return 128; }),
               IntKey("n_groups", &GptConfig::mamba_num_groups, [](const GptConfig&) { return 8; }),
               IntKey("conv_kernel", &GptConfig::mamba_conv_kernel, [](const GptConfig&) { return 4; }), ExpandKey(),
               RealKey("layer_norm_epsilon", &GptConfig::layernorm_epsilon, 1e-5),
               RealKey("initializer_range", &GptConfig::init_method_std, 0.1),
               FlagKey("use_bias", &GptConfig::add_bias_linear, false),
               FlagKey("use_conv_bias", &GptConfig::mamba_conv_bias, true),
               FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false), OnlyKey("hidden_act", "silu"),
               OnlyKey("rms_norm", true), TimeStepLimitKey(), MambaFreeKeys()},
      .tensors = Tensors(),
      .unused = {}};
  return kMamba2;
}

}  // namespace mbridge
