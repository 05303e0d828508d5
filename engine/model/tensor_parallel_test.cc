// Tensor-parallel ranks, with and without sequence parallelism, against one rank: losses and every parameter's gradient.
#include "engine/model/tensor_parallel.h"

#include <cmath>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "engine/comm/test_support.h"
#include "engine/core/arena.h"
#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"
#include "engine/model/linear.h"
#include "engine/ops/convert.h"

namespace mbridge {
namespace {

std::vector<float> Floats(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.size()));
  Convert({}, tensor, DType::kF32, {values.data(), DType::kF32, DeviceType::kCpu, tensor.shape});
  return values;
}

// This rank's shard of a whole tensor, by the rule that the specification states.
std::vector<float> ShardOf(const std::vector<float>& whole, const ParameterSpec& spec) {
  if (spec.shard_axis < 0) return whole;
  const int64_t rows = spec.global_shape[0], columns = spec.global_shape.NumElements() / rows;
  const std::vector<int64_t> stripes = spec.stripes.empty() ? std::vector{spec.shape[spec.shard_axis]} : spec.stripes;
  const int64_t ranks = spec.global_shape[spec.shard_axis] / spec.shape[spec.shard_axis];
  std::vector<char> mine;  // By index along the axis.
  for (const int64_t width : stripes) {
    for (int64_t i = 0; i < width * ranks; ++i) mine.push_back(i / width == spec.shard_begin / stripes[0]);
  }
  std::vector<float> shard;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      if (mine[static_cast<size_t>(spec.shard_axis == 0 ? i : j)] != 0)
        shard.push_back(whole[static_cast<size_t>(i * columns + j)]);
    }
  }
  return shard;
}

double Length(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

double Distance(std::vector<float> a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return Length(a);
}

struct Batch {
  std::vector<int32_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
};

constexpr int kRows = 3;

Batch MakeBatch(const GptConfig& config) {
  std::mt19937 engine(5);
  Batch batch;
  for (int64_t i = 0; i < kRows * config.seq_length; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
    batch.labels.push_back(static_cast<int32_t>(engine() % config.padded_vocab_size));
    batch.position_ids.push_back(static_cast<int32_t>(i % config.seq_length));
    batch.loss_mask.push_back(engine() % 4 == 0 ? 0.0f : 1.0f);
  }
  return batch;
}

// A model of one rank with its parameters.
struct Ready {
  Ready(const GptConfig& config, Communicator* group) : model(config, group), store(config.dtype, DeviceType::kCpu) {
    model.DeclareParameters(&store);
    store.Allocate();
  }

  void Fill(int index, const std::vector<float>& values) {
    const Tensor& value = store[index].value;
    ASSERT_EQ(static_cast<int64_t>(values.size()), value.size()) << store[index].spec.name;
    Convert({}, {const_cast<float*>(values.data()), DType::kF32, DeviceType::kCpu, value.shape}, value.dtype, value);
  }
  GptModel::LossSum Train(const Batch& batch, RngStreams* streams) {
    return model.ForwardBackward(batch.tokens.data(), batch.labels.data(), batch.loss_mask.data(), batch.position_ids.data(),
                                 1.0f, streams);
  }

  GptModel model;
  ParameterStore store;
};

GptConfig Gpt() {
  GptConfig config;
  config.num_layers = 2;
  config.hidden_size = 24;
  config.num_attention_heads = config.num_query_groups = 4;
  config.kv_channels = 8;
  config.ffn_hidden_size = 40;
  config.seq_length = 12;
  config.max_position_embeddings = 12;
  config.padded_vocab_size = 48;
  config.init_method_std = 0.3;
  config.hidden_dropout = config.attention_dropout = 0.0;
  config.dtype = DType::kF32;
  return config;
}

// Post norms, multipliers and soft caps.
GptConfig Gemma() {
  GptConfig config = Gpt();
  config.normalization = NormKind::kRmsNorm;
  config.activation = ActivationKind::kGegluTanh;
  config.post_layernorm = true;
  config.embedding_multiplier = 2.0;
  config.residual_multiplier = 0.5;
  config.final_logit_softcapping = 5.0;
  return config;
}

// Grouped queries, gated MLP with bias, query-key norms, rotary positions, an output layer of its own.
GptConfig Qwen() {
  GptConfig config = Gpt();
  config.normalization = NormKind::kRmsNorm;
  config.activation = ActivationKind::kSwiGlu;
  config.position_embedding = PositionKind::kRope;
  config.rotary_base = 100;
  config.num_attention_heads = 8;
  config.kv_channels = 4;
  config.qk_layernorm = true;
  config.tied_embeddings = false;
  return config;
}

// A plain layer, then experts of which a token gets two, beside shared ones with a gate.
GptConfig Experts() {
  GptConfig config = Qwen();
  config.add_bias_linear = false;
  config.num_moe_experts = 4;
  config.moe_layer_freq = {0, 1};
  config.moe_ffn_hidden_size = 16;
  config.moe_router_topk = 2;
  config.moe_aux_loss_coeff = 0.1;
  config.moe_z_loss_coeff = 0.01;
  config.moe_shared_expert_intermediate_size = 24;
  config.moe_shared_expert_gate = true;
  return config;
}

// Latent attention, with or without a latent vector of the queries.
GptConfig DeepSeek(int64_t q_lora_rank) {
  GptConfig config = Experts();
  config.qk_layernorm = false;
  config.num_query_groups = config.num_attention_heads = 4;
  config.multi_latent_attention = true;
  config.q_lora_rank = q_lora_rank;
  config.kv_lora_rank = 12;
  config.qk_head_dim = 6;
  config.qk_pos_emb_head_dim = 4;
  config.kv_channels = 10;
  config.v_head_dim = 8;
  config.moe_shared_expert_gate = false;
  return config;
}

// Biases of router and experts, sinks, windows.
GptConfig GptOss() {
  GptConfig config = Experts();
  config.qk_layernorm = false;
  config.add_bias_linear = true;
  config.attention_sinks = true;
  config.attention_window = 5;
  config.moe_layer_freq = {1, 1};
  config.moe_router_topk = 4;  // The router's bias outweighs its scores of such small inputs: some expert would get no tokens.
  config.activation = ActivationKind::kQuickGeglu;
  config.activation_clamp = 7;
  config.glu_linear_offset = 1;
  config.moe_shared_expert_intermediate_size = 0;
  config.moe_shared_expert_gate = false;
  return config;
}

// A Mamba-2 mixer alone, attention alone, both side by side before an MLP.
GptConfig Hybrid() {
  GptConfig config = Qwen();
  config.qk_layernorm = false;
  config.bias_activation_fusion = false;
  config.num_layers = 3;
  config.mixers = {MixerKind::kMamba2, MixerKind::kAttention, MixerKind::kAttentionAndMamba2};
  config.mlp_layer_freq = {0, 0, 1};
  config.mamba_state_dim = 5;
  config.mamba_head_dim = 6;
  config.mamba_num_groups = 4;
  config.mamba_num_heads = 8;
  config.mamba_multipliers = {0.6, 4.0, 6.0, 6.0, 3.0};
  return config;
}

struct Case {
  int ranks;
  bool sequence_parallel;
};

class TensorParallelModel : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { omp_set_num_threads(1); }  // Tiny products: threads would only wait for each other.

  // Losses within `loss_bound` of one rank's, gradients within `gradient_bound` of their length.
  static void ExpectEqualsOneRank(GptConfig config, double loss_bound, double gradient_bound) {
    config.sequence_parallel = GetParam().sequence_parallel;
    const Batch batch = MakeBatch(config);
    Ready whole(config, nullptr);
    std::mt19937 engine(3);
    std::normal_distribution<float> normal(0.0f, 0.2f);
    std::vector<std::vector<float>> values;
    for (size_t i = 0; i < whole.store.parameters().size(); ++i) {
      std::vector<float>& value = values.emplace_back(whole.store.parameters()[i].value.size());
      for (float& v : value) v = normal(engine);
      whole.Fill(static_cast<int>(i), value);
    }
    whole.model.Prepare(whole.store, kRows);
    RngStreams streams(7);
    const double loss = whole.Train(batch, &streams).loss_sum;
    OnRanks(GetParam().ranks, [&](Communicator& group) {
      omp_set_num_threads(1);
      Ready share(config, &group);
      ASSERT_EQ(share.store.parameters().size(), values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        share.Fill(static_cast<int>(i), ShardOf(values[i], share.store.parameters()[i].spec));
      }
      share.model.Prepare(share.store, kRows);
      RngStreams own(7, 0, group.rank());
      const GptModel::LossSum sum = share.Train(batch, &own);
      EXPECT_NEAR(sum.loss_sum, loss, loss_bound * loss);
      EXPECT_EQ(share.model.Evaluate(batch.tokens.data(), batch.labels.data(), batch.loss_mask.data(), batch.position_ids.data())
                    .loss_sum,
                sum.loss_sum);
      for (size_t i = 0; i < values.size(); ++i) {
        const Parameter& parameter = share.store.parameters()[i];
        if (parameter.spec.partial_gradient) group.AllReduce(parameter.main_grad, ReduceOp::kSum);
        const std::vector<float> expected = ShardOf(Floats(whole.store.parameters()[i].main_grad), parameter.spec);
        ASSERT_GT(Length(expected), 1e-5) << parameter.spec.name;
        EXPECT_LE(Distance(Floats(parameter.main_grad), expected), gradient_bound * Length(expected)) << parameter.spec.name;
      }
      // The first rank's words come before the second's.
      Arena arena(size_t{1} << 20);
      const Tensor part = arena.Allocate(DType::kF32, {config.seq_length, kRows, config.padded_vocab_size / group.size()});
      share.model.Logits(batch.tokens.data(), batch.position_ids.data(), part);
      EXPECT_GT(Length(Floats(part)), 1.0);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelModel, testing::Values(Case{2, false}, Case{2, true}, Case{4, true}),
                         [](const auto& info) {
                           return std::to_string(info.param.ranks) + (info.param.sequence_parallel ? "Sequence" : "Whole");
                         });

TEST_P(TensorParallelModel, GptEqualsOneRank) { ExpectEqualsOneRank(Gpt(), 1e-6, 1e-5); }

TEST_P(TensorParallelModel, QwenEqualsOneRank) { ExpectEqualsOneRank(Qwen(), 1e-6, 1e-5); }

TEST_P(TensorParallelModel, HybridEqualsOneRank) { ExpectEqualsOneRank(Hybrid(), 1e-6, 2e-5); }

TEST_P(TensorParallelModel, NormsOverProjectionsEqualOneRank) {
  GptConfig config = Qwen();
  config.qk_norm_over_projection = true;
  ExpectEqualsOneRank(config, 1e-6, 1e-5);
}

TEST_P(TensorParallelModel, GemmaEqualsOneRank) { ExpectEqualsOneRank(Gemma(), 1e-6, 1e-5); }

TEST_P(TensorParallelModel, ExpertsEqualOneRank) { ExpectEqualsOneRank(Experts(), 1e-6, 2e-5); }

TEST_P(TensorParallelModel, LatentAttentionEqualsOneRank) {
  ExpectEqualsOneRank(DeepSeek(0), 1e-6, 2e-5);
  ExpectEqualsOneRank(DeepSeek(14), 1e-6, 2e-5);
}

TEST_P(TensorParallelModel, SinksAndExpertBiasesEqualOneRank) { ExpectEqualsOneRank(GptOss(), 1e-6, 2e-5); }

TEST_P(TensorParallelModel, Bf16FollowsOneRank) {
  GptConfig config = Gpt();
  config.dtype = DType::kBF16;
  ExpectEqualsOneRank(config, 1e-3, 3e-2);
}

// Each rank draws its own part of what is split, and the same of what is not.
TEST_P(TensorParallelModel, ReplicasAreDrawnAlike) {
  GptConfig config = DeepSeek(14);
  OnRanks(GetParam().ranks, [&](Communicator& group) {
    omp_set_num_threads(1);
    Ready share(config, &group);
    RngStreams streams(7, 0, group.rank());
    share.model.InitializeWeights(&share.store, &streams);
    for (const Parameter& parameter : share.store.parameters()) {
      if (parameter.spec.shape.rank() < 2) continue;
      const std::vector<float> mine = Floats(parameter.value);
      group.Broadcast(parameter.value, 0);
      if (group.rank() > 0) {
        EXPECT_EQ(mine == Floats(parameter.value), parameter.spec.shard_axis < 0) << parameter.spec.name;
      }
    }
  });
}

// Rows of the residual stream that two ranks hold get one mask; parameters that they hold alike get one gradient.
TEST_P(TensorParallelModel, ReplicasStayEqualWithDropout) {
  GptConfig config = Gpt();
  config.hidden_dropout = config.attention_dropout = 0.2;
  config.sequence_parallel = GetParam().sequence_parallel;
  const Batch batch = MakeBatch(config);
  OnRanks(GetParam().ranks, [&](Communicator& group) {
    omp_set_num_threads(1);
    Ready share(config, &group);
    RngStreams streams(7, 0, group.rank());
    share.model.InitializeWeights(&share.store, &streams);
    share.model.Prepare(share.store, kRows);
    const RngStreams::State before = streams.Save();
    double loss = share.Train(batch, &streams).loss_sum;
    const RngStreams::State after = streams.Save();
    // With sequence parallelism everything is drawn from the ranks' own streams.
    EXPECT_EQ(after[1] == before[1], config.sequence_parallel);
    EXPECT_GT(after[3], before[3]);
    double equal = loss;
    group.Broadcast({&equal, DType::kF64, DeviceType::kCpu, {1}}, 0);
    EXPECT_EQ(loss, equal);
    for (const Parameter& parameter : share.store.parameters()) {
      if (parameter.spec.shard_axis >= 0) continue;
      if (parameter.spec.partial_gradient) group.AllReduce(parameter.main_grad, ReduceOp::kSum);
      const std::vector<float> mine = Floats(parameter.main_grad);
      group.Broadcast(parameter.main_grad, 0);
      EXPECT_EQ(mine, Floats(parameter.main_grad)) << parameter.spec.name;
    }
  });
}

// Two linear layers on the residual stream, split by columns and by rows, against the same without ranks.
TEST_P(TensorParallelModel, LinearPairEqualsOneRank) {
  const int ranks = GetParam().ranks;
  const bool sequence_parallel = GetParam().sequence_parallel;
  GptConfig config = Gpt();
  constexpr int64_t kHidden = 6, kWidth = 8, kBatch = 2;
  config.hidden_size = kHidden;
  const int64_t rows = config.seq_length * kBatch;
  std::mt19937 engine(11);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const auto random = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = uniform(engine);
    return values;
  };
  const std::vector<float> x = random(rows * kHidden), dy = random(rows * kHidden), up = random(kWidth * kHidden),
                           down = random(kHidden * kWidth);
  const auto run = [&](Communicator* group, bool parallel) {
    const int size = group->size();
    const int64_t width = kWidth / size, own_rows = parallel ? rows / size : rows,
                  first = parallel ? group->rank() * own_rows : 0;
    ParameterStore store(DType::kF32, DeviceType::kCpu);
    const auto add = [&](const Shape& shape, const Shape& global, int axis) {
      return store.Add(
          {.name = "w", .shape = shape, .global_shape = global, .shard_axis = axis, .shard_begin = group->rank() * width});
    };
    const Linear columns{.weight = add({width, kHidden}, {kWidth, kHidden}, 0), .split = LinearSplit::kColumns};
    const Linear down_rows{.weight = add({kHidden, width}, {kHidden, kWidth}, 1), .split = LinearSplit::kRows};
    store.Allocate();
    const auto fill = [](const Tensor& to, const std::vector<float>& from) {
      std::copy(from.begin(), from.end(), to.as<float>());
    };
    fill(store[0].value, ShardOf(up, store[0].spec));
    fill(store[1].value, ShardOf(down, store[1].spec));
    const Weights weights(&store, DType::kF32);
    Arena arena(size_t{1} << 20);
    const auto tensor = [&](int64_t count, int64_t n) { return arena.Allocate(DType::kF32, {count / kBatch, kBatch, n}); };
    Step step;
    step.config = &config;
    step.seq_length = config.seq_length;
    step.micro_batch_size = kBatch;
    step.tensor_parallel = {group, parallel, tensor(rows, kHidden)};
    const Tensor input = tensor(own_rows, kHidden), output = tensor(own_rows, kHidden), d_output = tensor(own_rows, kHidden),
                 d_input = tensor(own_rows, kHidden), middle = tensor(rows, width), d_middle = tensor(rows, width),
                 scratch = arena.Allocate(DType::kF32, {kWidth * kHidden});
    std::copy_n(x.data() + first * kHidden, input.size(), input.as<float>());
    std::copy_n(dy.data() + first * kHidden, input.size(), d_output.as<float>());
    columns.Forward(step, weights, input, middle);
    down_rows.Forward(step, weights, middle, output);
    down_rows.Backward(step, weights, d_output, middle, d_middle, scratch);
    columns.Backward(step, weights, d_middle, input, d_input, scratch);
    return std::vector<std::vector<float>>{Floats(output), Floats(d_input), Floats(store[0].main_grad),
                                           Floats(store[1].main_grad)};
  };
  const auto expected = run(MakeSelfCommunicator().get(), false);
  OnRanks(ranks, [&](Communicator& group) {
    omp_set_num_threads(1);
    const auto got = run(&group, sequence_parallel);
    const int64_t width = kWidth / ranks;
    const ParameterSpec of_stream{.name = "stream",
                                  .shape = {rows / ranks, kHidden},
                                  .global_shape = {rows, kHidden},
                                  .shard_axis = sequence_parallel ? 0 : -1,
                                  .shard_begin = group.rank() * rows / ranks};
    const ParameterSpec of_up{.name = "up",
                              .shape = {width, kHidden},
                              .global_shape = {kWidth, kHidden},
                              .shard_axis = 0,
                              .shard_begin = group.rank() * width};
    const ParameterSpec of_down{.name = "down",
                                .shape = {kHidden, width},
                                .global_shape = {kHidden, kWidth},
                                .shard_axis = 1,
                                .shard_begin = group.rank() * width};
    const ParameterSpec* specs[] = {&of_stream, &of_stream, &of_up, &of_down};
    for (int i = 0; i < 4; ++i) EXPECT_LE(Distance(got[i], ShardOf(expected[i], *specs[i])), 1e-5) << i;
  });
}

// What a model is told of its group where nothing is exchanged.
class Place : public Communicator {
 public:
  Place(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void AllReduce(const Tensor&, ReduceOp) override { ThrowEngineError("no exchange is expected"); }
  void ReduceScatter(const Tensor&, const Tensor&) override { ThrowEngineError("no exchange is expected"); }
  void AllGather(const Tensor&, const Tensor&) override { ThrowEngineError("no exchange is expected"); }
  void Broadcast(const Tensor&, int) override { ThrowEngineError("no exchange is expected"); }
  void Barrier() override {}
  std::unique_ptr<Communicator> Split(const std::vector<int>&, const std::string&) override { return MakeSelfCommunicator(); }

 private:
  int rank_, size_;
};

std::string ErrorOf(const GptConfig& config, int ranks) {
  Place place(0, ranks);
  try {
    GptModel(config, &place);
  } catch (const EngineError& error) {
    EXPECT_EQ(error.reason(), v1::REASON_INVALID_CONFIG);
    return error.what();
  }
  return "";
}

TEST(TensorParallel, RefusesSizesThatDoNotDivide) {
  EXPECT_EQ(ErrorOf(Gpt(), 4), "");
  EXPECT_THAT(ErrorOf(Gpt(), 3), testing::HasSubstr("num_attention_heads, which is 4"));
  GptConfig config = Gpt();
  config.num_query_groups = 2;
  EXPECT_THAT(ErrorOf(config, 4), testing::HasSubstr("num_query_groups, which is 2"));
  config = Gpt();
  config.ffn_hidden_size = 41;
  EXPECT_THAT(ErrorOf(config, 2), testing::HasSubstr("ffn_hidden_size, which is 41"));
  config = Experts();
  config.moe_ffn_hidden_size = 15;
  EXPECT_THAT(ErrorOf(config, 2), testing::HasSubstr("moe_ffn_hidden_size, which is 15"));
  config = Experts();
  config.moe_shared_expert_intermediate_size = 25;
  EXPECT_THAT(ErrorOf(config, 2), testing::HasSubstr("moe_shared_expert_intermediate_size, which is 25"));
  config = Gpt();
  config.padded_vocab_size = 49;
  EXPECT_THAT(ErrorOf(config, 2), testing::HasSubstr("vocab_size, which is 49"));
  config = Gpt();
  config.seq_length = 11;
  EXPECT_EQ(ErrorOf(config, 2), "");
  config.sequence_parallel = true;
  EXPECT_THAT(ErrorOf(config, 2), testing::HasSubstr("which is 11"));
}

// The first values of the two ranks' shards as Megatron-LM draws them, from an emulation of its generators that follows the
// losses of a real run of this model (docs/parity.md). Seeds 3952 and 3953.
TEST(TensorParallel, EachRankDrawsItsShards) {
  GptConfig config;
  config.num_layers = 2;
  config.hidden_size = 256;
  config.num_attention_heads = config.num_query_groups = 4;
  config.kv_channels = 64;
  config.ffn_hidden_size = 1024;
  config.seq_length = config.max_position_embeddings = 512;
  config.padded_vocab_size = 32000;
  const std::vector<std::vector<std::pair<std::string, std::vector<float>>>> expected = {
      {{"embedding.word_embeddings.weight", {0.0162353515625f, -0.01165771484375f, 0.032470703125f}},
       {"decoder.layers.0.self_attention.linear_proj.weight",
        {-0.00830078125f, 0.0003566741943359375f, 0.0093994140625f, 0.001922607421875f}},
       {"decoder.layers.0.self_attention.linear_qkv.weight",
        {0.03564453125f, -0.00732421875f, 0.0027008056640625f, -0.03466796875f}},
       {"decoder.layers.0.mlp.linear_fc1.weight", {0.015625f, -0.005767822265625f, -0.01397705078125f, 0.00506591796875f}},
       {"decoder.layers.0.mlp.linear_fc2.weight", {0.0007171630859375f, 0.01611328125f, 0.01318359375f, -0.00168609619140625f}}},
      {{"embedding.word_embeddings.weight", {-0.022705078125f, -0.00836181640625f, -0.032470703125f, 0.0341796875f}},
       {"decoder.layers.0.self_attention.linear_proj.weight",
        {0.001861572265625f, -0.011962890625f, -0.004302978515625f, -0.0218505859375f}},
       {"decoder.layers.0.self_attention.linear_qkv.weight",
        {0.009765625f, -0.005462646484375f, -0.0036163330078125f, -0.0184326171875f}}}};
  std::vector<float> position_heads;
  for (int rank = 0; rank < 2; ++rank) {
    Place place(rank, 2);
    Ready ready(config, &place);
    RngStreams streams(1234, 0, rank);
    ready.model.InitializeWeights(&ready.store, &streams);
    EXPECT_EQ(streams.model_parallel.offset, 48u);
    for (const auto& [name, head] : expected[rank]) {
      const Parameter& parameter = ready.store[ready.store.Find(name)];
      std::vector<float> values = Floats(parameter.value);
      values.resize(head.size());
      EXPECT_EQ(values, head) << name << " of rank " << rank;
    }
    const Parameter& positions = ready.store[ready.store.Find("embedding.position_embeddings.weight")];
    EXPECT_EQ(positions.spec.shard_axis, -1);
    position_heads.push_back(ToFloat(positions.value.as<BFloat16>()[0]));
    const Parameter& fc2 = ready.store[ready.store.Find("decoder.layers.1.mlp.linear_fc2.weight")];
    EXPECT_EQ(fc2.spec.shape, (Shape{256, 512}));
    EXPECT_EQ(fc2.spec.global_shape, (Shape{256, 1024}));
    EXPECT_EQ(fc2.spec.shard_begin, 512 * rank);
    EXPECT_EQ(ready.store.NumGlobalElements(), 9903104);
  }
  EXPECT_EQ(position_heads[0], position_heads[1]);
}

}  // namespace
}  // namespace mbridge
