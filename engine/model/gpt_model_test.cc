#include "engine/model/gpt_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "engine/comm/communicator.h"
#include "engine/core/parameter.h"

namespace mbridge {
namespace {

GptConfig SmallConfig() {
  GptConfig config;
  config.num_layers = 2;
  config.hidden_size = 24;
  config.num_attention_heads = config.num_query_groups = 3;
  config.kv_channels = 8;
  config.ffn_hidden_size = 40;
  config.seq_length = 10;
  config.max_position_embeddings = 12;
  config.padded_vocab_size = 50;
  config.init_method_std = 0.3;  // Large, so that every part has a visible gradient.
  config.dtype = DType::kF32;
  return config;
}

struct Batch {
  std::vector<int32_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
};

Batch MakeBatch(const GptConfig& config, int64_t rows, uint32_t seed = 1) {
  std::mt19937 engine(seed);
  Batch batch;
  for (int64_t i = 0; i < rows * config.seq_length; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
    batch.labels.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
    batch.position_ids.push_back(static_cast<int32_t>(i % config.seq_length));
    batch.loss_mask.push_back(engine() % 4 == 0 ? 0.0f : 1.0f);
  }
  return batch;
}

// A model with its parameters, ready to run.
class Ready {
 public:
  explicit Ready(const GptConfig& config, int rows = 2)
      : model_(config, nullptr), store_(config.dtype, DeviceType::kCpu), rows_(rows) {
    model_.DeclareParameters(&store_);
    store_.Allocate();
    RngStreams streams(7);
    model_.InitializeWeights(&store_, &streams);
    // Norm weights and biases get values that a wrong sign or place would show.
    std::mt19937 engine(3);
    std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
    for (const Parameter& parameter : store_.parameters()) {
      if (parameter.spec.shape.rank() > 1) continue;
      for (int64_t i = 0; i < parameter.value.size(); ++i) Set(parameter, i, Get(parameter, i) + uniform(engine));
    }
    model_.Prepare(store_, rows);
    streams_ = streams.Save();
  }

  static float Get(const Parameter& parameter, int64_t i) {
    switch (parameter.value.dtype) {
      case DType::kBF16: return ToFloat(parameter.value.as<BFloat16>()[i]);
      case DType::kF16: return ToFloat(parameter.value.as<Float16>()[i]);
      default: return parameter.value.as<float>()[i];
    }
  }
  static void Set(const Parameter& parameter, int64_t i, float value) {
    switch (parameter.value.dtype) {
      case DType::kBF16: parameter.value.as<BFloat16>()[i] = ToBFloat16(value); break;
      case DType::kF16: parameter.value.as<Float16>()[i] = ToFloat16(value); break;
      default: parameter.value.as<float>()[i] = value;
    }
  }

  // Starts from the same stream positions at each call, so that dropout masks repeat.
  GptModel::LossSum Train(const Batch& batch, float grad_scale = 1.0f, RngStreams* streams = nullptr) {
    RngStreams fresh = RngStreams::Restore(streams_);
    return model_.ForwardBackward(batch.tokens.data(), batch.labels.data(), batch.loss_mask.data(), batch.position_ids.data(),
                                  grad_scale, streams == nullptr ? &fresh : streams);
  }
  GptModel::LossSum Evaluate(const Batch& batch) {
    return model_.Evaluate(batch.tokens.data(), batch.labels.data(), batch.loss_mask.data(), batch.position_ids.data());
  }
  std::vector<float> Gradients() const {
    const float* g = store_.main_grads().as<float>();
    return {g, g + store_.main_grads().size()};
  }
  GptModel& model() { return model_; }
  ParameterStore& store() { return store_; }
  RngStreams::State streams() const { return streams_; }

 private:
  GptModel model_;
  ParameterStore store_;
  int rows_;
  RngStreams::State streams_;
};

// For every parameter: the slope of the mean loss along the gradient must be the gradient's length.
void ExpectGradientsAreSlopes(const GptConfig& config, int rows = 2, double step = 2e-3) {
  Ready ready(config, rows);
  const Batch batch = MakeBatch(config, rows);
  const GptModel::LossSum sum = ready.Train(batch);
  for (const Parameter& parameter : ready.store().parameters()) {
    const int64_t count = parameter.value.size();
    const float* grad = parameter.main_grad.as<float>();
    const std::vector<float> direction(grad, grad + count);
    double length = 0;
    for (float g : direction) length += static_cast<double>(g) * g;
    length = std::sqrt(length);
    ASSERT_GT(length, 1e-5) << parameter.spec.name;
    const std::vector<float> kept(parameter.value.as<float>(), parameter.value.as<float>() + count);
    const auto loss_at = [&](double t) {
      for (int64_t i = 0; i < count; ++i) Ready::Set(parameter, i, kept[i] + static_cast<float>(t * direction[i] / length));
      ready.model().OnWeightsChanged();
      return ready.Train(batch).loss_sum / sum.tokens;
    };
    const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
    loss_at(0.0);
    ready.store().ZeroGradients();  // For the next parameter, without what the probes added.
    ready.Train(batch);
    EXPECT_NEAR(slope, length, 0.01 * length + 3e-4) << parameter.spec.name;
  }
}

TEST(GptModelTest, GradientsWithoutDropout) {
  GptConfig config = SmallConfig();
  config.hidden_dropout = config.attention_dropout = 0.0;
  ExpectGradientsAreSlopes(config);
}

TEST(GptModelTest, GradientsWithDropout) { ExpectGradientsAreSlopes(SmallConfig()); }

TEST(GptModelTest, GradientsOfTheUnfusedForm) {
  GptConfig config = SmallConfig();
  config.bias_activation_fusion = config.bias_dropout_fusion = false;
  config.attention_softmax_in_fp32 = true;
  ExpectGradientsAreSlopes(config);
}

TEST(GptModelTest, GradientsOfOtherParts) {
  GptConfig config = SmallConfig();
  config.tied_embeddings = false;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 5;
  config.add_bias_linear = false;
  config.position_embedding = PositionKind::kNone;
  ExpectGradientsAreSlopes(config);
}

GptConfig LlamaConfig() {
  GptConfig config = SmallConfig();
  config.normalization = NormKind::kRmsNorm;
  config.activation = ActivationKind::kSwiGlu;
  config.position_embedding = PositionKind::kRope;
  config.rotary_base = 100;
  config.tied_embeddings = config.add_bias_linear = false;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.hidden_dropout = config.attention_dropout = 0.0;
  config.max_position_embeddings = 0;  // Without a table nothing reads it.
  return config;
}

TEST(GptModelTest, GradientsOfLlama) { ExpectGradientsAreSlopes(LlamaConfig()); }

TEST(GptModelTest, GradientsOfLlamaWithBiasesAndDropout) {
  GptConfig config = LlamaConfig();
  config.add_bias_linear = config.tied_embeddings = true;
  config.bias_activation_fusion = false;
  config.hidden_dropout = config.attention_dropout = 0.1;
  ExpectGradientsAreSlopes(config);
}

TEST(GptModelTest, GradientsOfQwen) {
  GptConfig config = LlamaConfig();
  config.qk_layernorm = config.add_qkv_bias = true;
  config.rotary_percent = 0.5;
  config.attention_window = 4;
  config.rope_scaling = true;
  config.rope_original_length = 20;
  ExpectGradientsAreSlopes(config);
}

// Layers of one block each, and one of both mixers and an MLP.
GptConfig HybridConfig() {
  GptConfig config = LlamaConfig();
  config.num_layers = 4;
  config.mixers = {MixerKind::kMamba2, MixerKind::kAttention, MixerKind::kNone, MixerKind::kAttentionAndMamba2};
  config.mlp_layer_freq = {0, 0, 1, 1};
  config.mamba_state_dim = 5;
  config.mamba_head_dim = 3;
  config.mamba_num_groups = 2;
  config.mamba_num_heads = 4;
  return config;
}

TEST(GptModelTest, GradientsOfHybrids) {
  GptConfig config = HybridConfig();
  ExpectGradientsAreSlopes(config);
  config.attention_in_multiplier = 0.7;
  config.attention_out_multiplier = 1.3;
  config.key_multiplier = 1.6;
  config.mlp_gate_multiplier = 0.8;
  config.mlp_out_multiplier = 1.2;
  config.mamba_in_multiplier = 1.1;
  config.mamba_out_multiplier = 0.9;
  config.mamba_multipliers = {0.6, 1.4, 0.8, 1.3, 1.2};
  config.mamba_norm_groups = 1;
  config.mamba_norm_before_gate = true;
  config.residual_multiplier = 0.9;
  ExpectGradientsAreSlopes(config);
}

TEST(GptModelTest, GradientsOfHybridsWithBiasesAndDropout) {
  GptConfig config = HybridConfig();
  config.add_bias_linear = true;
  config.bias_activation_fusion = config.mamba_conv_bias = config.mamba_rms_norm = false;
  config.hidden_dropout = config.attention_dropout = 0.1;
  config.mamba_out_multiplier = 0.9;
  ExpectGradientsAreSlopes(config);
}

TEST(GptModelTest, NamesOfHybrids) {
  GptModel model(HybridConfig(), nullptr);
  ParameterStore store(DType::kF32, DeviceType::kCpu);
  model.DeclareParameters(&store);
  std::vector<std::string> names;
  for (const Parameter& parameter : store.parameters()) {
    const std::string& name = parameter.spec.name;
    if (name.starts_with("decoder.layers.0.") || name.starts_with("decoder.layers.2.")) {
      names.push_back(name.substr(15) + parameter.spec.shape.ToString());
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"0.norm.weight[24]", "0.mixer.in_proj.weight[48, 24]",
                                             "0.mixer.conv1d.weight[32, 1, 4]", "0.mixer.conv1d.bias[32]", "0.mixer.dt_bias[4]",
                                             "0.mixer.A_log[4]", "0.mixer.D[4]", "0.mixer.norm.weight[12]",
                                             "0.mixer.out_proj.weight[24, 12]", "2.pre_mlp_layernorm.weight[24]",
                                             "2.mlp.linear_fc1.weight[80, 24]", "2.mlp.linear_fc2.weight[24, 40]"}));
}

// Time steps between 0.001 and 0.1, decays between 1 and 16, convolutions below 1 / sqrt(taps).
TEST(GptModelTest, InitialWeightsOfMamba) {
  GptConfig config = HybridConfig();
  config.mamba_num_heads = 64;
  GptModel model(config, nullptr);
  ParameterStore store(DType::kF32, DeviceType::kCpu);
  model.DeclareParameters(&store);
  store.Allocate();
  RngStreams streams(7);
  model.InitializeWeights(&store, &streams);
  const auto range = [&](const char* name) {
    const Tensor& value = store[store.Find(std::string("decoder.layers.0.mixer.") + name)].value;
    const auto [least, most] = std::minmax_element(value.as<float>(), value.as<float>() + value.size());
    return std::pair(*least, *most);
  };
  const auto dt = range("dt_bias"), a_log = range("A_log"), conv = range("conv1d.weight");
  EXPECT_GE(std::log1p(std::exp(dt.first)), 0.00099f);
  EXPECT_LE(std::log1p(std::exp(dt.second)), 0.101f);
  EXPECT_GT(dt.second - dt.first, 2.0f);
  EXPECT_GE(a_log.first, 0.0f);
  EXPECT_LE(a_log.second, 2.7726f);
  EXPECT_GT(a_log.second - a_log.first, 1.5f);
  EXPECT_GE(conv.first, -0.5f);
  EXPECT_LE(conv.second, 0.5f);
  EXPECT_GT(conv.second - conv.first, 0.9f);
}

TEST(GptModelTest, RefusesHybridsThatDoNotFit) {
  const auto reason = [](const GptConfig& config) -> std::string {
    try {
      ValidateGptConfig(config);
    } catch (const EngineError& error) {
      return error.what();
    }
    return "";
  };
  GptConfig config = HybridConfig();
  EXPECT_EQ(reason(config), "");
  config.mamba_num_groups = 3;
  EXPECT_NE(reason(config).find("model.mamba_num_heads is 4"), std::string::npos) << reason(config);
  config = HybridConfig();
  config.mlp_layer_freq = {0, 0, 0, 1};
  EXPECT_NE(reason(config).find("layer 2 has neither"), std::string::npos) << reason(config);
  config = HybridConfig();
  config.mixers.pop_back();
  EXPECT_NE(reason(config).find("says 3 layers"), std::string::npos) << reason(config);
  config = HybridConfig();
  config.key_multiplier = 2;
  config.add_bias_linear = true;
  EXPECT_NE(reason(config).find("multipliers"), std::string::npos) << reason(config);
  EXPECT_THROW(RequireCudaParts(HybridConfig()), EngineError);
}

TEST(GptModelTest, NamesOfTheLlamaFamily) {
  GptConfig config = LlamaConfig();
  config.num_layers = 1;
  config.qk_layernorm = config.add_qkv_bias = true;
  GptModel model(config, nullptr);
  ParameterStore store(config.dtype, DeviceType::kCpu);
  model.DeclareParameters(&store);
  std::vector<std::string> names;
  for (const Parameter& parameter : store.parameters()) names.push_back(parameter.spec.name + parameter.spec.shape.ToString());
  const std::string layer = "decoder.layers.0.";
  EXPECT_EQ(names, (std::vector<std::string>{
                       "embedding.word_embeddings.weight[50, 24]", layer + "input_layernorm.weight[24]",
                       layer + "self_attention.linear_proj.weight[24, 32]", layer + "self_attention.linear_qkv.weight[64, 24]",
                       layer + "self_attention.linear_qkv.bias[64]", layer + "self_attention.q_layernorm.weight[8]",
                       layer + "self_attention.k_layernorm.weight[8]", layer + "pre_mlp_layernorm.weight[24]",
                       layer + "mlp.linear_fc1.weight[80, 24]", layer + "mlp.linear_fc2.weight[24, 40]",
                       "decoder.final_layernorm.weight[24]", "output_layer.weight[50, 24]"}));
}

// More tokens than a block of the output head and more words than a tile.
TEST(GptModelTest, GradientsAcrossBlocksAndTiles) {
  GptConfig config = SmallConfig();
  config.num_layers = 1;
  config.hidden_size = 16;
  config.num_attention_heads = config.num_query_groups = 1;
  config.ffn_hidden_size = 8;
  config.seq_length = config.max_position_embeddings = 530;
  config.padded_vocab_size = 2100;
  config.hidden_dropout = config.attention_dropout = 0.0;
  ExpectGradientsAreSlopes(config, 4);
}

double Cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / std::sqrt(aa * bb);
}

TEST(GptModelTest, NarrowTypesFollowFp32) {
  GptConfig config = SmallConfig();
  config.init_method_std = 0.1;
  Ready exact(config);
  const Batch batch = MakeBatch(config, 2);
  const GptModel::LossSum expected = exact.Train(batch);
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    // The eager attention mask of a 2-byte type differs from that of fp32, so this comparison has no dropout.
    GptConfig narrow = config, wide = config;
    narrow.hidden_dropout = narrow.attention_dropout = wide.hidden_dropout = wide.attention_dropout = 0.0;
    narrow.dtype = dtype;
    Ready reference(wide), ready(narrow);
    const double loss = reference.Train(batch).loss_sum;
    const GptModel::LossSum sum = ready.Train(batch);
    EXPECT_EQ(sum.tokens, expected.tokens);
    EXPECT_NEAR(sum.loss_sum, loss, dtype == DType::kBF16 ? 0.02 * loss : 0.003 * loss);
    EXPECT_GT(Cosine(ready.Gradients(), reference.Gradients()), dtype == DType::kBF16 ? 0.999 : 0.9999);
  }
}

TEST(GptModelTest, SameSeedSameBits) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    GptConfig config = SmallConfig();
    config.dtype = dtype;
    const Batch batch = MakeBatch(config, 2);
    Ready a(config), b(config);
    EXPECT_EQ(a.Train(batch).loss_sum, b.Train(batch).loss_sum);
    EXPECT_EQ(a.Gradients(), b.Gradients());
  }
}

TEST(GptModelTest, EvaluationDrawsNothingAndHasNoDropout) {
  GptConfig config = SmallConfig();
  const Batch batch = MakeBatch(config, 2);
  Ready with_dropout(config);
  config.hidden_dropout = config.attention_dropout = 0.0;
  Ready without(config);
  const double evaluated = with_dropout.Evaluate(batch).loss_sum;
  EXPECT_EQ(evaluated, without.Train(batch).loss_sum);
  EXPECT_NE(evaluated, with_dropout.Train(batch).loss_sum);
  with_dropout.store().ZeroGradients();
  with_dropout.Evaluate(batch);
  for (float g : with_dropout.Gradients()) EXPECT_EQ(g, 0.0f);
}

TEST(GptModelTest, StreamsAdvanceAsMegatronLmsDo) {
  for (bool fused : {true, false}) {
    GptConfig config = SmallConfig();
    config.bias_dropout_fusion = fused;
    Ready ready(config);
    RngStreams streams = RngStreams::Restore(ready.streams());
    const RngStreams before = streams;
    ready.Train(MakeBatch(config, 2), 1.0f, &streams);
    EXPECT_EQ(streams.default_stream.offset, before.default_stream.offset + 4 + 8 * config.num_layers);
    EXPECT_EQ(streams.model_parallel.offset, before.model_parallel.offset + 4 * config.num_layers);
    EXPECT_EQ(streams.cpu.drawn(), before.cpu.drawn());
  }
  GptConfig config = SmallConfig();
  config.hidden_dropout = config.attention_dropout = 0.0;
  Ready ready(config);
  RngStreams streams = RngStreams::Restore(ready.streams());
  ready.Train(MakeBatch(config, 2), 1.0f, &streams);
  EXPECT_EQ(streams.Save(), ready.streams());
}

TEST(GptModelTest, GradientsAccumulateAndScale) {
  GptConfig config = SmallConfig();
  const Batch batch = MakeBatch(config, 2);
  Ready once(config), twice(config), scaled(config);
  once.Train(batch);
  twice.Train(batch);
  twice.Train(batch);
  scaled.Train(batch, 4.0f);
  const std::vector<float> a = once.Gradients(), b = twice.Gradients(), c = scaled.Gradients();
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(b[i], 2 * a[i]);
    ASSERT_NEAR(c[i], 4 * a[i], 1e-5 + 1e-4 * std::fabs(a[i]));
  }
}

TEST(GptModelTest, MaskedTokensDoNotCount) {
  GptConfig config = SmallConfig();
  config.hidden_dropout = config.attention_dropout = 0.0;
  Batch batch = MakeBatch(config, 2);
  Ready a(config), b(config);
  const double loss = a.Train(batch).loss_sum;
  for (size_t i = 0; i < batch.labels.size(); ++i) {
    if (batch.loss_mask[i] == 0.0f) batch.labels[i] = (batch.labels[i] + 1) % 50;
  }
  EXPECT_EQ(b.Train(batch).loss_sum, loss);
  EXPECT_EQ(a.Gradients(), b.Gradients());
  batch.loss_mask.assign(batch.loss_mask.size(), 0.0f);
  b.store().ZeroGradients();
  const GptModel::LossSum none = b.Train(batch);
  EXPECT_EQ(none.loss_sum, 0.0);
  EXPECT_EQ(none.tokens, 0.0);
  for (float g : b.Gradients()) EXPECT_EQ(g, 0.0f);
}

TEST(GptModelTest, AnotherBatchSizeAfterPrepare) {
  GptConfig config = SmallConfig();
  Ready ready(config, 2), one(config, 1);
  const Batch batch = MakeBatch(config, 1);
  ready.model().Prepare(ready.store(), 1);
  EXPECT_EQ(ready.Train(batch).loss_sum, one.Train(batch).loss_sum);
  EXPECT_GT(ready.model().ActivationBytes(), 0);
}

v1::Reason ReasonOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const EngineError& error) {
    return error.reason();
  }
  return v1::REASON_UNSPECIFIED;
}

TEST(GptModelTest, RefusesWhatItCannotBuild) {
  const auto reason_with = [](auto change) {
    GptConfig config = SmallConfig();
    change(&config);
    return ReasonOf([&] { GptModel(config, nullptr); });
  };
  EXPECT_EQ(reason_with([](GptConfig* c) { c->num_layers = 0; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->hidden_dropout = 1.0; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->num_query_groups = 2; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->max_position_embeddings = 9; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->dtype = DType::kF64; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->attention_window = -1; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(reason_with([](GptConfig* c) { c->qk_layernorm = true; }), v1::REASON_UNSUPPORTED_MODEL);
  const auto rotary_reason_with = [&](auto change) {
    return reason_with([&](GptConfig* c) {
      c->position_embedding = PositionKind::kRope;
      change(c);
    });
  };
  EXPECT_EQ(rotary_reason_with([](GptConfig*) {}), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(rotary_reason_with([](GptConfig* c) { c->rotary_base = 0; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(rotary_reason_with([](GptConfig* c) { c->rotary_percent = 0.4; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(rotary_reason_with([](GptConfig* c) { c->rotary_percent = 0.1; }), v1::REASON_INVALID_CONFIG);
  EXPECT_EQ(rotary_reason_with([](GptConfig* c) { c->rope_scaling = true, c->rope_scaling_factor = 0; }),
            v1::REASON_INVALID_CONFIG);
}

TEST(GptModelTest, RefusesIdsOutOfRange) {
  GptConfig config = SmallConfig();
  Ready ready(config);
  Batch batch = MakeBatch(config, 2);
  batch.tokens[3] = 50;
  EXPECT_EQ(ReasonOf([&] { ready.Train(batch); }), v1::REASON_DATA_ERROR);
  batch.tokens[3] = 0;
  batch.labels[19] = -1;
  EXPECT_EQ(ReasonOf([&] { ready.Evaluate(batch); }), v1::REASON_DATA_ERROR);
  batch.labels[19] = 0;
  batch.position_ids[0] = 12;
  EXPECT_EQ(ReasonOf([&] { ready.Evaluate(batch); }), v1::REASON_DATA_ERROR);
}

TEST(GptModelTest, FlopsOfTheReferenceRun) {
  GptConfig config;
  config.num_layers = 32;
  config.hidden_size = 4096;
  config.num_attention_heads = config.num_query_groups = 32;
  config.kv_channels = 128;
  config.ffn_hidden_size = 16384;
  config.seq_length = config.max_position_embeddings = 2048;
  config.padded_vocab_size = 51200;
  const double dense = 6.0 * 32 * 12 * 4096.0 * 4096, core = 6.0 * 32 * 4096 * 2048, logits = 6.0 * 4096 * 51200;
  EXPECT_DOUBLE_EQ(GptModel(config, nullptr).FlopsPerToken(), dense + core + logits);
}

TEST(GptModelTest, FlopsOfAGatedModel) {
  GptConfig config = LlamaConfig();
  const double attention = 24.0 * (32 + 2 * 16) + 32.0 * 24 + 32.0 * 10, mlp = 3.0 * 24 * 40;
  EXPECT_DOUBLE_EQ(GptModel(config, nullptr).FlopsPerToken(), 6 * (2 * (attention + mlp) + 24.0 * 50));
}

}  // namespace
}  // namespace mbridge
