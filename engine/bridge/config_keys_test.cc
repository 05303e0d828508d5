// Options of config.json that no fixture has: rotary scalings, windows of some layers, old spellings.
#include "engine/bridge/config_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "engine/bridge/architecture.h"
#include "engine/bridge/config_form.h"

namespace mbridge {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Json Config(const char* model_type) {
  return {{"model_type", model_type}, {"vocab_size", 64},         {"hidden_size", 32},       {"num_hidden_layers", 4},
          {"num_attention_heads", 2}, {"num_key_value_heads", 1}, {"intermediate_size", 48}, {"max_position_embeddings", 4096}};
}

GptConfig Read(const Json& json) {
  const auto architecture = ArchitectureOf(json);
  EXPECT_TRUE(architecture.ok()) << architecture.status();
  const auto config = ReadModelConfig(**architecture, json);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(GptConfig());
}

std::string Refusal(const Json& json) {
  const auto architecture = ArchitectureOf(json);
  EXPECT_TRUE(architecture.ok()) << architecture.status();
  return std::string(ReadModelConfig(**architecture, json).status().message());
}

// What a config means survives being written from nothing.
void ExpectRoundTrip(const Json& json) {
  const Architecture& architecture = **ArchitectureOf(json);
  const GptConfig config = Read(json);
  const auto written = WriteModelConfig(architecture, config, config.padded_vocab_size, Json());
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_TRUE(ModelShape(Read(*written)) == ModelShape(config)) << written->dump(2);
}

Json LlamaWith(const Json& rope) {
  Json json = Config("llama");
  json["rope_parameters"] = rope;
  return json;
}

TEST(ConfigKeysTest, Yarn) {
  const Json json = LlamaWith({{"rope_type", "yarn"},
                               {"rope_theta", 1000000.0},
                               {"factor", 4.0},
                               {"original_max_position_embeddings", 1024},
                               {"mscale", 0.707},
                               {"mscale_all_dim", 0.5},
                               {"truncate", false}});
  const GptConfig config = Read(json);
  EXPECT_EQ(config.yarn_rotary_scaling_factor, 4);
  EXPECT_EQ(config.rope_original_length, 1024);
  EXPECT_EQ(config.yarn_beta_fast, 32);
  EXPECT_FALSE(config.yarn_correction_range_round_to_int);
  EXPECT_NEAR(config.rope_attention_factor, (0.0707 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1), 1e-12);
  ExpectRoundTrip(json);
}

TEST(ConfigKeysTest, DynamicAndLinear) {
  const Json dynamic = LlamaWith({{"rope_type", "dynamic"}, {"rope_theta", 10000.0}, {"factor", 2.0}});
  EXPECT_EQ(Read(dynamic).rope_dynamic_factor, 2);
  EXPECT_EQ(Read(dynamic).rope_original_length, 4096);
  ExpectRoundTrip(dynamic);
  const Json linear = LlamaWith({{"rope_type", "linear"}, {"rope_theta", 10000.0}, {"factor", 8.0}});
  EXPECT_EQ(Read(linear).seq_len_interpolation_factor, 8);
  ExpectRoundTrip(linear);
}

TEST(ConfigKeysTest, LongRopeOfPhi3InBothForms) {
  const std::vector<double> short_factor(8, 1.5), long_factor(8, 3.0);
  Json json = Config("phi3");
  json["original_max_position_embeddings"] = 1024;
  json["rope_theta"] = 10000.0;
  json["rope_scaling"] = {{"type", "longrope"}, {"short_factor", short_factor}, {"long_factor", long_factor}};
  const GptConfig config = Read(json);
  EXPECT_EQ(config.long_rope_short_factors, short_factor);
  EXPECT_EQ(config.long_rope_long_factors, long_factor);
  EXPECT_EQ(config.rope_original_length, 1024);
  EXPECT_NEAR(config.rope_attention_factor, std::sqrt(1 + std::log(4.0) / std::log(1024.0)), 1e-12);
  ExpectRoundTrip(json);
  json["rope_scaling"]["type"] = "su";  // Its first name.
  EXPECT_TRUE(ModelShape(Read(json)) == ModelShape(config));
  json["rope_scaling"]["long_factor"] = "many";
  EXPECT_THAT(Refusal(json), HasSubstr("long_factor"));
}

TEST(ConfigKeysTest, UnknownRotationsAreRefused) {
  EXPECT_THAT(Refusal(LlamaWith({{"rope_type", "spiral"}, {"rope_theta", 10000.0}})), HasSubstr("spiral"));
  EXPECT_THAT(Refusal(LlamaWith({{"rope_type", "default"}, {"rope_theta", 10000.0}, {"mrope_section", {1, 2}}})),
              HasSubstr("mrope_section"));
}

TEST(ConfigKeysTest, WindowsOfSomeLayers) {
  Json json = Config("qwen2");
  json["sliding_window"] = 16;
  json["use_sliding_window"] = true;
  json["max_window_layers"] = 1;
  EXPECT_EQ(Read(json).attention_window, 16);
  EXPECT_THAT(Read(json).window_attn_skip_freq, ElementsAre(0, 1, 1, 1));
  ExpectRoundTrip(json);
  json["max_window_layers"] = 4;
  EXPECT_EQ(Read(json).attention_window, 0);
  json["max_window_layers"] = 0;
  EXPECT_THAT(Read(json).window_attn_skip_freq, ElementsAre());
  json["layer_types"] = {"full_attention"};
  EXPECT_THAT(Refusal(json), HasSubstr("layer_types"));
}

TEST(ConfigKeysTest, Gemma3OfTheHub) {
  Json json = Config("gemma3_text");
  json["head_dim"] = 16;
  json["sliding_window"] = 512;
  json["sliding_window_pattern"] = 3;
  json["query_pre_attn_scalar"] = 168;
  json["rope_theta"] = 1000000.0;
  json["rope_local_base_freq"] = 10000.0;
  json["rope_scaling"] = {{"factor", 8.0}, {"rope_type", "linear"}};
  const GptConfig config = Read(json);
  EXPECT_THAT(config.window_attn_skip_freq, ElementsAre(1, 1, 0, 1));
  EXPECT_EQ(config.rotary_base, 1000000);
  EXPECT_EQ(config.rotary_base_local, 10000);
  EXPECT_EQ(config.seq_len_interpolation_factor, 8);
  EXPECT_EQ(config.softmax_scale, std::pow(168.0, -0.5));
  EXPECT_EQ(config.embedding_multiplier, std::sqrt(32.0));
  EXPECT_EQ(config.final_logit_softcapping, 0);
  ExpectRoundTrip(json);
  json["query_pre_attn_scalar"] = 0;
  EXPECT_THAT(Refusal(json), HasSubstr("query_pre_attn_scalar"));
}

TEST(ConfigKeysTest, Exaone4WithoutWindowTurnsEveryLayer) {
  Json json = Config("exaone4");
  json["sliding_window"] = nullptr;
  json["layer_types"] = std::vector<std::string>(4, "full_attention");
  EXPECT_TRUE(Read(json).no_rope_freq.empty());
  json["sliding_window"] = 16;
  json["sliding_window_pattern"] = "LLLG";
  json["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention", "full_attention"};
  EXPECT_THAT(Read(json).no_rope_freq, ElementsAre(0, 0, 0, 1));
  ExpectRoundTrip(json);
}

TEST(ConfigKeysTest, BiasesOfAttentionAndMlp) {
  for (const bool attention : {false, true}) {
    for (const bool mlp : {false, true}) {
      Json json = Config("llama");
      json["attention_bias"] = attention;
      json["mlp_bias"] = mlp;
      const GptConfig config = Read(json);
      EXPECT_EQ(config.add_bias_linear, attention && mlp);
      EXPECT_EQ(config.add_attention_output_bias, attention && !mlp);
      EXPECT_EQ(config.add_mlp_bias, mlp && !attention);
      ExpectRoundTrip(json);
    }
  }
  Json json = Config("qwen3");
  json["attention_bias"] = true;
  EXPECT_TRUE(Read(json).add_qkv_bias && Read(json).add_attention_output_bias);
  ExpectRoundTrip(json);
}

TEST(ConfigKeysTest, PartialRotationInTheOldForm) {
  Json json = Config("phi3");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.5}};
  const Json old = InFormOf({{"rope_theta", 1.0}}, json);
  EXPECT_EQ(old.value("partial_rotary_factor", 0.0), 0.5) << old.dump(2);
  EXPECT_TRUE(ModelShape(Read(old)) == ModelShape(Read(json)));
}

TEST(ConfigKeysTest, ActivationsByName) {
  Json json = {{"model_type", "gpt2"}, {"vocab_size", 64}, {"n_embd", 32}, {"n_head", 2}, {"n_layer", 2}, {"n_positions", 16}};
  EXPECT_EQ(Read(json).activation, ActivationKind::kGeluTanh);
  EXPECT_EQ(Read(json).ffn_hidden_size, 128);
  json["activation_function"] = "gelu";
  EXPECT_EQ(Read(json).activation, ActivationKind::kGelu);
  EXPECT_FALSE(Read(json).bias_activation_fusion) << "the fused form is the tanh approximation";
  ExpectRoundTrip(json);
  json["activation_function"] = "relu";
  EXPECT_THAT(Refusal(json), HasSubstr("gelu_new"));
}

}  // namespace
}  // namespace mbridge
