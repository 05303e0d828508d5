#include "engine/megatron/model_arguments.h"

#include <cmath>
#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/megatron/pickle_reader.h"

namespace mbridge {
namespace {

using testing::HasSubstr;

// The model of the least arguments that there must be, and of what `more` appends.
absl::StatusOr<GptConfig> ModelWith(const std::function<void(PickleWriter&)>& more) {
  PickleWriter pickle;
  pickle.BeginDict().Text("num_layers").Int(2).Text("hidden_size").Int(32).Text("num_attention_heads").Int(4);
  pickle.Text("padded_vocab_size").Int(64).Text("seq_length").Int(16);
  more(pickle);
  const absl::StatusOr<Pickle> read = ReadPickle(pickle.EndDict().Finish(), "arguments");
  if (!read.ok()) return read.status();
  return ModelOfArguments(*read->root);
}

std::string Refusal(const std::function<void(PickleWriter&)>& more) {
  const absl::StatusOr<GptConfig> model = ModelWith(more);
  EXPECT_FALSE(model.ok());
  return std::string(model.status().message());
}

void LatentWithFactor(PickleWriter& pickle) {
  pickle.Text("multi_latent_attention").Bool(true).Text("qk_layernorm").Bool(true);
  pickle.Text("rotary_scaling_factor").Float(4.0).Text("mscale_all_dim").Float(0.5);
}

TEST(ModelArguments, AbsentOnesAreMegatronsDefaults) {
  const auto model = ModelWith([](PickleWriter&) {});
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->normalization, NormKind::kLayerNorm);
  EXPECT_EQ(model->position_embedding, PositionKind::kLearnedAbsolute);
  EXPECT_EQ(model->ffn_hidden_size, 128);
  EXPECT_EQ(model->num_query_groups, 4);
  EXPECT_TRUE(model->tied_embeddings);
  EXPECT_TRUE(model->bias_activation_fusion) << "GELU in its tanh form";
}

TEST(ModelArguments, YarnOfLatentAttentionScalesAsMegatronCore) {
  const auto model = ModelWith([](PickleWriter& pickle) {
    LatentWithFactor(pickle);
    pickle.Text("mscale").Float(1.0);
  });
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->yarn_rotary_scaling_factor, 4.0);
  EXPECT_EQ(model->mscale_all_dim, 0.5);
  EXPECT_DOUBLE_EQ(model->rope_attention_factor, (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1));
}

TEST(ModelArguments, RefusalsNameTheArgument) {
  EXPECT_THAT(Refusal([](PickleWriter& pickle) { pickle.Text("normalization").Text("BatchNorm"); }),
              HasSubstr("args.normalization: is BatchNorm"));
  EXPECT_THAT(Refusal([](PickleWriter& pickle) { pickle.Text("qk_l2_norm").Bool(true); }), HasSubstr("args.qk_l2_norm"));
  EXPECT_THAT(Refusal([](PickleWriter& pickle) { pickle.Text("rotary_percent").Text("half"); }),
              HasSubstr("args.rotary_percent: is not a number"));
  // The scale of the scores without the positions that belong to it.
  EXPECT_THAT(Refusal([](PickleWriter& pickle) {
                LatentWithFactor(pickle);
                pickle.Text("rope_type").Text("rope");
              }),
              HasSubstr("args.mscale_all_dim"));
}

}  // namespace
}  // namespace mbridge
