#include "engine/train/model_keys.h"

#include "engine/train/expert_parts.h"
#include "engine/train/mixer_parts.h"
#include "engine/train/model_parts.h"

namespace mbridge {

v1::ModelConfig ModelKeys(const GptConfig& model) {
  v1::ModelConfig keys;
  keys.set_num_layers(model.num_layers);
  keys.set_hidden_size(model.hidden_size);
  keys.set_num_attention_heads(model.num_attention_heads);
  keys.set_num_query_groups(model.num_query_groups);
  keys.set_kv_channels(model.kv_channels);
  keys.set_ffn_hidden_size(model.ffn_hidden_size);
  keys.set_seq_length(model.seq_length);
  keys.set_vocab_size(model.padded_vocab_size);
  keys.set_normalization(model.normalization == NormKind::kRmsNorm ? "RMSNorm" : "LayerNorm");
  WriteActivation(model, &keys);
  if (!model.bias_activation_fusion) keys.set_bias_activation_fusion(false);  // The exact GELU.
  switch (model.position_embedding) {
    case PositionKind::kLearnedAbsolute: keys.set_position_embedding_type("learned_absolute"); break;
    case PositionKind::kRope: keys.set_position_embedding_type("rope"); break;
    case PositionKind::kNone: keys.set_position_embedding_type("none"); break;
  }
  keys.set_add_bias_linear(model.add_bias_linear);
  keys.set_add_qkv_bias(model.add_qkv_bias);
  if (model.add_attention_output_bias) keys.set_add_attention_output_bias(true);
  if (model.add_mlp_bias) keys.set_add_mlp_bias(true);
  keys.set_qk_layernorm(model.qk_layernorm);
  if (model.attention_window > 0) {
    keys.add_window_size(model.attention_window - 1);
    keys.add_window_size(0);
  }
  keys.set_share_embeddings_and_output_weights(model.tied_embeddings);
  if (model.position_embedding == PositionKind::kRope) {
    keys.set_rotary_base(model.rotary_base);
    keys.set_rotary_percent(model.rotary_percent);
    if (model.seq_len_interpolation_factor > 0) keys.set_seq_len_interpolation_factor(model.seq_len_interpolation_factor);
    keys.set_rope_scaling(model.rope_scaling);
    if (model.rope_scaling) keys.set_rope_scaling_factor(model.rope_scaling_factor);
  }
  keys.set_layernorm_epsilon(model.layernorm_epsilon);
  keys.set_init_method_std(model.init_method_std);
  WriteModelParts(model, &keys);
  WriteExpertParts(model, &keys);
  WriteMixerParts(model, &keys);
  return keys;
}

}  // namespace mbridge
