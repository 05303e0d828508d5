// Damaged overrides, values and Megatron-LM lines: an answer or an error, never a crash, and values read back as written.
#include <gtest/gtest.h>

#include "recipes/config/assignment.h"
#include "recipes/config/resolve.h"
#include "recipes/config/translate.h"
#include "recipes/config/value.h"
#include "tests/fuzz/mutate.h"

namespace mbridge::recipes {
namespace {

const char* const kOverrides[] = {"model.num_layers=2",
                                  "optimizer.lr=3e-4",
                                  "dataset.data_path=[0.3,/data/a,0.7,/data/b]",
                                  "+dataset.split='969, 30, 1'",
                                  "++mixed_precision={preset: bf16_mixed, grad_reduce_in_fp32: true}",
                                  "env_vars.NAME=\"a \\\" b\"",
                                  "model.window_size=[[1,2],[null,-7]]",
                                  "train.exit_interval=null"};

TEST(OverrideFuzz, EveryOverrideIsReadOrRefused) {
  fuzz::Mutator mutate(1);
  int accepted = 0;
  for (int i = 0; i < fuzz::Rounds(20000); ++i) {
    const std::string text = mutate(kOverrides[static_cast<size_t>(i) % std::size(kOverrides)]);
    const auto assignment = ParseOverride(text);
    if (!assignment.ok()) {
      ASSERT_TRUE(absl::IsInvalidArgument(assignment.status())) << text;
      continue;
    }
    ++accepted;
    ASSERT_FALSE(assignment->key.empty()) << text;
    const std::string written = FormatValue(assignment->value);
    const auto again = ParseValue(written);
    ASSERT_TRUE(again.ok()) << text << " -> " << written;
    ASSERT_EQ(FormatValue(*again), written) << text;
  }
  EXPECT_GT(accepted, 500) << "the mutations no longer reach what lies behind the parser";
}

// The key may exist, the value be of the right type and in range, or not.
TEST(OverrideFuzz, EveryConfigurationIsResolvedOrRefused) {
  fuzz::Mutator mutate(2);
  for (int i = 0; i < fuzz::Rounds(150); ++i) {
    ResolveRequest request;
    request.recipe = "vanilla_gpt_megatron_lm_config";
    request.overrides = {"model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "train.train_iters=10",
                         "train.global_batch_size=4"};
    std::string& changed = request.overrides[mutate.Below(request.overrides.size())];
    changed = mutate(changed);
    const auto resolved = Resolve(request);
    if (resolved.ok()) continue;
    ASSERT_FALSE(resolved.status().message().empty()) << changed;
    ASSERT_FALSE(absl::IsInternal(resolved.status())) << changed << ": " << resolved.status();
  }
}

TEST(OverrideFuzz, EveryMegatronLineIsTranslatedOrRefused) {
  const std::string line =
      "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size=256 --num-attention-heads 4 --seq-length 512 "
      "--max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 3e-4 --bf16 "
      "--data-path 0.3 '/a b' 0.7 /c --split \"949,50,1\" --moe-layer-freq ([0]*1+[1]*26) # end";
  fuzz::Mutator mutate(3);
  for (int i = 0; i < fuzz::Rounds(500); ++i) {
    const std::string text = mutate(line);
    const auto translation = TranslateFromMegatron(text);
    if (!translation.ok()) {
      ASSERT_FALSE(translation.status().message().empty()) << text;
    }
  }
}

}  // namespace
}  // namespace mbridge::recipes
