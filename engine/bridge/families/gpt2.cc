// GPT-2: LayerNorm, learned positions, inputs before outputs in the weights of linear layers.
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"

namespace mbridge {
namespace {

const std::string kOurs = "decoder.layers.{layer}.";
const std::string kTheirs = "transformer.h.{layer}.";

// In GPT-2 the sizes of a head and of key and value follow from those of the model.
ConfigKey HeadsKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    to->num_attention_heads = to->num_query_groups = from->Int("n_head");
    if (to->num_attention_heads > 0) to->kv_channels = to->hidden_size / to->num_attention_heads;
  };
  const auto write = [](const GptConfig& from, Json* to) { (*to)["n_head"] = from.num_attention_heads; };
  return CustomKey({"n_head"}, read, write);
}

std::vector<ConfigKey> Keys() {
  return {IntKey("vocab_size", &GptConfig::padded_vocab_size),
          IntKey("n_embd", &GptConfig::hidden_size),
          IntKey("n_layer", &GptConfig::num_layers),
          IntKey("n_positions", &GptConfig::max_position_embeddings, [](const GptConfig&) { return int64_t{1024}; }),
          IntKey("n_inner", &GptConfig::ffn_hidden_size, [](const GptConfig& c) { return 4 * c.hidden_size; }),
          HeadsKey(),
          ActivationKey("activation_function", {{"gelu_new", ActivationKind::kGeluTanh},
                                                {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
                                                {"gelu", ActivationKind::kGelu}}),
          RealKey("layer_norm_epsilon", &GptConfig::layernorm_epsilon, 1e-5),
          RealKey("initializer_range", &GptConfig::init_method_std, 0.02),
          RealKey("attn_pdrop", &GptConfig::attention_dropout, 0.1),
          FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, true),
          OnlyKey("scale_attn_weights", true),
          OnlyKey("scale_attn_by_inverse_layer_idx", false),
          OnlyKey("add_cross_attention", false),
          FreeKeys({"n_ctx", "resid_pdrop", "embd_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
                    "summary_activation", "summary_proj_to_labels", "summary_first_dropout"})};
}

std::vector<TensorRule> Tensors() {
  std::vector<TensorRule> rules = {
      {.ours = "embedding.word_embeddings.weight", .theirs = {"transformer.wte.weight"}, .vocabulary = true},
      {.ours = "embedding.position_embeddings.weight", .theirs = {"transformer.wpe.weight"}},
      {.ours = "output_layer.weight", .theirs = {"lm_head.weight"}, .vocabulary = true}};
  for (const std::string kind : {".weight", ".bias"}) {
    const auto add = [&](const std::string& ours, const std::string& theirs, bool transposed, RowOrder order) {
      rules.push_back(
          {.ours = kOurs + ours + kind, .theirs = {kTheirs + theirs + kind}, .order = order, .transposed = transposed});
    };
    rules.push_back({.ours = "decoder.final_layernorm" + kind, .theirs = {"transformer.ln_f" + kind}});
    add("input_layernorm", "ln_1", false, nullptr);
    add("self_attention.linear_qkv", "attn.c_attn", true, QkvRows);
    add("self_attention.linear_proj", "attn.c_proj", true, nullptr);
    add("pre_mlp_layernorm", "ln_2", false, nullptr);
    add("mlp.linear_fc1", "mlp.c_fc", true, nullptr);
    add("mlp.linear_fc2", "mlp.c_proj", true, nullptr);
  }
  return rules;
}

}  // namespace

const Architecture& Gpt2Architecture() {
  static const Architecture kGpt2 = {.model_type = "gpt2",
                                     .class_name = "GPT2LMHeadModel",
                                     .parts = {.normalization = NormKind::kLayerNorm,
                                               .activation = ActivationKind::kGeluTanh,
                                               .position_embedding = PositionKind::kLearnedAbsolute,
                                               .add_bias_linear = true},
                                     .keys = Keys(),
                                     .tensors = Tensors(),
                                     // Causal masks, which old files hold.
                                     .unused = {kTheirs + "attn.bias", kTheirs + "attn.masked_bias"},
                                     .accepts = {},
                                     .prefix = "transformer."};
  return kGpt2;
}

}  // namespace mbridge
