// DeepSeek-V2 and V2-Lite (multi-latent attention, softmax router), DeepSeek-V3 (sigmoid router with correction bias).
#include "engine/bridge/families/common_tensors.h"
#include "engine/bridge/families/families.h"
#include "engine/bridge/families/moe_parts.h"

namespace mbridge {
namespace {

GptConfig Parts(RouterScore score, bool expert_bias) {
  GptConfig parts;
  parts.normalization = NormKind::kRmsNorm;
  parts.activation = ActivationKind::kSwiGlu;
  parts.position_embedding = PositionKind::kRope;
  parts.add_bias_linear = false;
  parts.multi_latent_attention = true;
  parts.rotary_interleaved = true;
  parts.moe_router_score = score;
  parts.moe_router_enable_expert_bias = expert_bias;
  parts.moe_router_fp32 = true;
  return parts;
}

// Sizes of the latent vectors and of a head's parts. head_dim of the file is the turned part.
ConfigKey LatentKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const int64_t none = 0;
    to->q_lora_rank = from->Int("q_lora_rank", &none);
    to->kv_lora_rank = from->Int("kv_lora_rank");
    to->qk_head_dim = from->Int("qk_nope_head_dim");
    to->qk_pos_emb_head_dim = from->Int("qk_rope_head_dim");
    to->v_head_dim = from->Int("v_head_dim");
    to->kv_channels = to->qk_head_dim + to->qk_pos_emb_head_dim;
    to->num_query_groups = to->num_attention_heads;
    const int64_t sum = to->kv_channels;
    if (from->Int("qk_head_dim", &sum) != sum) from->Unsupported("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim");
    const double plain = 0;
    const bool yarn = to->yarn_rotary_scaling_factor > 0;
    to->mscale_all_dim = yarn ? from->Real("rope_parameters/mscale_all_dim", &plain) : 0.0;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    (*to)["q_lora_rank"] = from.q_lora_rank > 0 ? Json(from.q_lora_rank) : Json();
    (*to)["kv_lora_rank"] = from.kv_lora_rank;
    (*to)["qk_nope_head_dim"] = from.qk_head_dim;
    (*to)["qk_rope_head_dim"] = from.qk_pos_emb_head_dim;
    (*to)["v_head_dim"] = from.v_head_dim;
    (*to)["head_dim"] = from.qk_pos_emb_head_dim;
    if (from.mscale_all_dim != 0) (*to)["rope_parameters"]["mscale_all_dim"] = from.mscale_all_dim;
    if (to->contains("qk_head_dim")) (*to)["qk_head_dim"] = from.qk_head_dim + from.qk_pos_emb_head_dim;
  };
  return CustomKey({"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"}, read,
                   write);
}

std::vector<ConfigKey> Keys() {
  return JoinKeys({DecoderKeys(),
                   {OnlyKey("hidden_act", "silu"), RealKey("rms_norm_eps", &GptConfig::layernorm_epsilon, 1e-6), RopeKey(),
                    LatentKey(), FlagKey("tie_word_embeddings", &GptConfig::tied_embeddings, false),
                    OnlyKey("attention_bias", false), OnlyKey("mlp_bias", false)},
                   DeepSeekExpertKeys()});
}

// topk_method, n_group, topk_group: a group counts by its best expert.
ConfigKey SoftmaxGroupsKey() {
  const auto read = [](ConfigReader* from, GptConfig* to) {
    const std::string method = from->Text("topk_method", "greedy");
    if (method == "greedy") return;
    if (method != "group_limited_greedy") return from->Unsupported("topk_method", "greedy or group_limited_greedy");
    to->moe_router_num_groups = from->Int("n_group");
    to->moe_router_group_topk = from->Int("topk_group");
    to->moe_router_group_experts = 1;
  };
  const auto write = [](const GptConfig& from, Json* to) {
    const bool groups = from.moe_router_num_groups > 0;
    (*to)["topk_method"] = groups ? "group_limited_greedy" : "greedy";
    (*to)["n_group"] = groups ? from.moe_router_num_groups : 1;
    (*to)["topk_group"] = groups ? from.moe_router_group_topk : 1;
  };
  return CustomKey({"topk_method", "n_group", "topk_group"}, read, write);
}

std::vector<TensorRule> Tensors() {
  const std::string ours = "decoder.layers.{layer}.self_attention.", theirs = "model.layers.{layer}.self_attn.";
  std::vector<TensorRule> attention;
  const auto add = [&](const char* our_name, const char* their_name) {
    attention.push_back({.ours = ours + our_name + ".weight", .theirs = {theirs + their_name + ".weight"}});
  };
  add("linear_q_proj", "q_proj");
  add("linear_q_down_proj", "q_a_proj");
  add("linear_q_up_proj", "q_b_proj");
  add("q_layernorm", "q_a_layernorm");
  add("linear_kv_down_proj", "kv_a_proj_with_mqa");
  add("linear_kv_up_proj", "kv_b_proj");
  add("kv_layernorm", "kv_a_layernorm");
  add("linear_proj", "o_proj");
  return JoinTensors(
      {EmbeddingAndHeadTensors(), PreNormTensors(), attention, GatedMlpTensors(), ExpertTensors({.block = "mlp"})});
}

}  // namespace

const Architecture& DeepSeekV2Architecture() {
  static const Architecture kV2 = {.model_type = "deepseek_v2",
                                   .class_name = "DeepseekV2ForCausalLM",
                                   .parts = Parts(RouterScore::kSoftmax, false),
                                   .keys = JoinKeys({Keys(),
                                                     {SoftmaxGroupsKey(), OnlyKey("norm_topk_prob", false),
                                                      OnlyKey("scoring_func", "softmax"), OnlyKey("rope_interleave", true)}}),
                                   .tensors = Tensors(),
                                   .unused = {kRotaryFrequencies}};
  return kV2;
}

const Architecture& DeepSeekV3Architecture() {
  static const Architecture kV3 = {
      .model_type = "deepseek_v3",
      .class_name = "DeepseekV3ForCausalLM",
      .parts = Parts(RouterScore::kSigmoid, true),
      .keys = JoinKeys({Keys(),
                        {SigmoidGroupsKey(), OnlyKey("norm_topk_prob", true), OnlyKey("scoring_func", "sigmoid"),
                         OnlyKey("topk_method", "noaux_tc"), OnlyKey("rope_interleave", true)}}),
      .tensors = Tensors(),
      .unused = {kRotaryFrequencies}};
  return kV3;
}

}  // namespace mbridge
