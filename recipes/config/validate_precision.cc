// Linear layers in 8 and 4 bits: what fits together, and what the engine does not have.
#include <algorithm>

#include "recipes/config/validate.h"

namespace mbridge::recipes {
namespace {

std::string Number(int64_t value) { return std::to_string(value); }

// Elements that share a scale, or what the matrix products of tensor cores want.
int64_t BlockOf(const v1::ModelConfig& m) { return m.has_fp8() && m.fp8_recipe() == "mxfp8" ? 32 : 16; }

// Every side of the matrix products has whole blocks.
void ValidateSides(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  const int64_t block = BlockOf(m), ranks = std::max<int64_t>(1, m.tensor_model_parallel_size());
  const std::string by = m.has_fp4() ? "model.fp4=" + m.fp4() : "model.fp8_recipe=" + m.fp8_recipe();
  const auto divides = [&](const std::string& key, const std::string& what, int64_t side) {
    if (side < 1 || side % block == 0) return;
    state->Fail(key,
                "makes " + what + " " + Number(side) + " on each rank; allowed with " + by + ": multiples of " + Number(block));
  };
  divides("model.hidden_size", "the width of the residual stream", m.hidden_size());
  divides("model.ffn_hidden_size", "the width of the MLP", m.ffn_hidden_size() / ranks);
  if (!m.multi_latent_attention()) {
    const int64_t context = m.kv_channels() * m.num_attention_heads() / ranks;
    divides("model.kv_channels", "the width of the heads", context);
    divides("model.num_query_groups", "the width of queries, keys and values",
            context + 2 * m.kv_channels() * m.num_query_groups() / ranks);
  } else {
    divides("model.v_head_dim", "the width of the heads", m.num_attention_heads() * m.v_head_dim() / ranks);
  }
  divides("train.micro_batch_size", "with model.seq_length the tokens of a micro-batch",
          state->config.train().micro_batch_size() * m.seq_length());
}

}  // namespace

std::vector<FieldViolation> UnsupportedPrecision(const v1::ModelConfig& m) {
  std::vector<FieldViolation> parts;
  const auto refuse = [&](bool wanted, const char* key, const std::string& why) {
    if (wanted) parts.push_back({key, why});
  };
  refuse(m.has_fp8() && m.fp8_recipe() == "custom", "model.fp8_recipe",
         "is custom, which is code of one's own in Megatron-LM; accepted: tensorwise, delayed, blockwise, mxfp8");
  refuse(m.has_fp4() && m.fp4_recipe() == "custom", "model.fp4_recipe",
         "is custom, which is code of one's own in Megatron-LM; accepted: nvfp4");
  const std::string attention =
      "is true; accepted: false, attention stays in 16 bits (its 8-bit backward pass is slower on Hopper)";
  refuse(m.fp8_dot_product_attention(), "model.fp8_dot_product_attention", attention);
  refuse(m.fp8_multi_head_attention(), "model.fp8_multi_head_attention", attention);
  refuse(m.fp8_output_proj(), "model.fp8_output_proj", "is true; accepted: false, the output layer stays in 16 bits");
  return parts;
}

void ValidatePrecision(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  if (!m.has_fp8() && !m.has_fp4()) return;
  if (m.has_fp8() && m.has_fp4()) return state->Fail("model.fp4", "and model.fp8 are both set; leave one of them out");
  if (!m.bf16() && !m.fp16()) {
    return state->Fail(
        m.has_fp8() ? "model.fp8" : "model.fp4",
        "is set without a 16-bit type; choose mixed_precision=bf16_mixed, fp16_mixed or a preset with fp8 or nvfp4");
  }
  ValidateSides(state);
  if (m.first_last_layers_bf16() && m.num_layers_at_start_in_bf16() + m.num_layers_at_end_in_bf16() == 0) {
    state->Fail("mixed_precision.first_last_layers_bf16",
                "is true and keeps no layer in 16 bits: mixed_precision.num_layers_at_start_in_bf16 and "
                "mixed_precision.num_layers_at_end_in_bf16 are 0; set them, for example to 1, or leave it out");
  }
  if (m.first_last_layers_bf16() && m.num_layers_at_start_in_bf16() + m.num_layers_at_end_in_bf16() >= m.num_layers()) {
    state->warnings.push_back("model.num_layers_at_start_in_bf16 (" + Number(m.num_layers_at_start_in_bf16()) +
                              ") and model.num_layers_at_end_in_bf16 (" + Number(m.num_layers_at_end_in_bf16()) +
                              ") keep all model.num_layers (" + Number(m.num_layers()) + ") layers in 16 bits");
  }
  if (m.num_moe_experts() > 0 || m.multi_latent_attention()) {
    state->warnings.push_back(std::string(m.num_moe_experts() > 0 ? "experts" : "multi-latent projections") +
                              " stay in 16 bits: " + (m.has_fp8() ? "model.fp8" : "model.fp4") +
                              " applies to the linear layers of attention and of plain MLPs");
  }
}

}  // namespace mbridge::recipes
