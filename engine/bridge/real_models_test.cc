// Parameter counts of published models from the values of their config.json.
#include <gtest/gtest.h>

#include "engine/bridge/architecture.h"

namespace mbridge {
namespace {

int64_t CountParameters(const Json& config) {
  const auto architecture = ArchitectureOf(config);
  EXPECT_TRUE(architecture.ok()) << architecture.status();
  if (!architecture.ok()) return 0;
  const auto model = ReadModelConfig(**architecture, config);
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) return 0;
  const auto parameters = ModelParameters(*model);
  EXPECT_TRUE(parameters.ok()) << parameters.status();
  int64_t count = 0;
  for (const ParameterSpec& parameter : *parameters) count += parameter.global_shape.NumElements();
  return count;
}

const Json kLlama3Scaling = {{"factor", 32.0},
                             {"high_freq_factor", 4.0},
                             {"low_freq_factor", 1.0},
                             {"original_max_position_embeddings", 8192},
                             {"rope_type", "llama3"}};

TEST(RealModels, Llama32With1B) {
  EXPECT_EQ(CountParameters({{"model_type", "llama"},
                             {"vocab_size", 128256},
                             {"hidden_size", 2048},
                             {"num_hidden_layers", 16},
                             {"num_attention_heads", 32},
                             {"num_key_value_heads", 8},
                             {"head_dim", 64},
                             {"intermediate_size", 8192},
                             {"max_position_embeddings", 131072},
                             {"rms_norm_eps", 1e-5},
                             {"rope_theta", 500000.0},
                             {"rope_scaling", kLlama3Scaling},
                             {"attention_bias", false},
                             {"mlp_bias", false},
                             {"hidden_act", "silu"},
                             {"torch_dtype", "bfloat16"},
                             {"tie_word_embeddings", true}}),
            1'235'814'400);
}

TEST(RealModels, Llama3With8B) {
  EXPECT_EQ(CountParameters({{"model_type", "llama"},
                             {"vocab_size", 128256},
                             {"hidden_size", 4096},
                             {"num_hidden_layers", 32},
                             {"num_attention_heads", 32},
                             {"num_key_value_heads", 8},
                             {"intermediate_size", 14336},
                             {"max_position_embeddings", 8192},
                             {"rms_norm_eps", 1e-5},
                             {"rope_theta", 500000.0},
                             {"rope_scaling", nullptr},
                             {"pretraining_tp", 1},
                             {"torch_dtype", "bfloat16"},
                             {"tie_word_embeddings", false}}),
            8'030'261'248);
}

TEST(RealModels, Qwen3With8B) {
  EXPECT_EQ(CountParameters({{"model_type", "qwen3"},
                             {"vocab_size", 151936},
                             {"hidden_size", 4096},
                             {"num_hidden_layers", 36},
                             {"num_attention_heads", 32},
                             {"num_key_value_heads", 8},
                             {"head_dim", 128},
                             {"intermediate_size", 12288},
                             {"max_position_embeddings", 40960},
                             {"max_window_layers", 36},
                             {"rms_norm_eps", 1e-6},
                             {"rope_theta", 1000000},
                             {"rope_scaling", nullptr},
                             {"sliding_window", nullptr},
                             {"use_sliding_window", false},
                             {"attention_bias", false},
                             {"tie_word_embeddings", false}}),
            8'190'735'360);
}

}  // namespace
}  // namespace mbridge
