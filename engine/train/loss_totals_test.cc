#include "engine/train/loss_totals.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <vector>

#include "engine/comm/test_support.h"
#include "engine/core/parameter.h"

namespace mbridge {
namespace {

class TinyModel {
 public:
  TinyModel() : model_(Config(), nullptr), store_(DType::kF32, DeviceType::kCpu) {
    model_.DeclareParameters(&store_);
    store_.Allocate();
    RngStreams streams(7);
    model_.InitializeWeights(&store_, &streams);
    model_.Prepare(store_, 1);
  }
  GptModel& model() { return model_; }
  // Evaluates words that begin with `first`, of which the last `masked` do not count.
  void Evaluate(int32_t first, int64_t masked) {
    const int64_t s = model_.config().seq_length;
    std::vector<int32_t> tokens, labels, positions;
    std::vector<float> mask;
    for (int64_t i = 0; i < s; ++i) {
      tokens.push_back(static_cast<int32_t>((first + i) % 30));
      labels.push_back(static_cast<int32_t>((first + 7 * i) % 30));
      positions.push_back(static_cast<int32_t>(i));
      mask.push_back(i < s - masked ? 1.0f : 0.0f);
    }
    model_.AddEvaluation({tokens.data(), labels.data(), mask.data(), positions.data()});
  }

 private:
  static GptConfig Config() {
    GptConfig config;
    config.num_layers = 1;
    config.hidden_size = 16;
    config.num_attention_heads = config.num_query_groups = 2;
    config.kv_channels = 8;
    config.ffn_hidden_size = 32;
    config.seq_length = config.max_position_embeddings = 8;
    config.padded_vocab_size = 32;
    config.init_method_std = 0.3;
    config.dtype = DType::kF32;
    return config;
  }

  GptModel model_;
  ParameterStore store_;
};

TEST(LossTotals, OfAllRanksSinceTheLastTime) {
  OnRanks(2, [](Communicator& world) {
    omp_set_num_threads(1);
    TinyModel tiny;
    LossTotals totals({}, &world);
    for (const bool one_stops : {false, true, false}) {
      // What both ranks add, in the order of the ranks.
      double loss = 0, words = 0;
      for (const int rank : {0, 1}) {
        tiny.Evaluate(3 * rank + (one_stops ? 1 : 0), rank);
        const GptModel::LossSum sum = tiny.model().TakeLossSum();
        loss += sum.loss_sum;
        words += sum.tokens;
      }
      EXPECT_EQ(words, 15);
      tiny.Evaluate(3 * world.rank() + (one_stops ? 1 : 0), world.rank());
      totals.Sum(&tiny.model(), one_stops && world.rank() == 1);
      EXPECT_EQ(totals.MeanLoss(), loss / words);
      EXPECT_EQ(totals.StopRequested(), one_stops);
      EXPECT_EQ(tiny.model().TakeLossSum().tokens, 0) << "they are taken";
    }
  });
}

}  // namespace
}  // namespace mbridge
