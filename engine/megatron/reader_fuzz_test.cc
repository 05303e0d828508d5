// Readers of Megatron-LM's files under damage: they end with a value or an error, never in a crash, and never take much memory.
#include "engine/megatron/conversion_test_support.h"
#include "engine/megatron/model_arguments.h"
#include "engine/megatron/pickle_reader.h"
#include "engine/megatron/stored_model.h"
#include "tests/fuzz/mutate.h"

namespace mbridge {
namespace {

class MegatronFuzz : public MegatronTest {
 protected:
  // Damages one file of a checkpoint again and again and imports it.
  void Damage(const std::string& fixture, const std::string& file, int rounds, uint64_t seed) {
    const std::string source = Copy(fixture);
    const std::string whole = Read(source + "/" + file);
    ASSERT_FALSE(whole.empty()) << file;
    fuzz::Mutator mutate(seed);
    int read = 0;
    for (int round = 0; round < rounds; ++round) {
      Write(source + "/" + file, mutate(whole));
      const auto plan = PlanMegatronImport(Import(source));
      if (!plan.ok()) continue;
      ++read;
      std::filesystem::remove_all(Path("checkpoint"));
      RunMegatronImport(Import(source), {}).status().IgnoreError();
    }
    fmt::print("{}: {} of {} were still read\n", file, read, rounds);
  }
};

TEST_F(MegatronFuzz, Metadata) { Damage("gpt/torch_dist", "iter_0000010/.metadata", fuzz::Rounds(150), 1); }
TEST_F(MegatronFuzz, MetadataOfSeveralRanks) { Damage("llama/torch_dist", "iter_0000010/.metadata", fuzz::Rounds(50), 2); }
TEST_F(MegatronFuzz, Arguments) { Damage("gpt/torch_dist", "iter_0000010/common.pt", fuzz::Rounds(150), 3); }
TEST_F(MegatronFuzz, Data) { Damage("gpt/torch_dist", "iter_0000010/__0_0.distcp", fuzz::Rounds(20), 4); }
TEST_F(MegatronFuzz, RankFile) { Damage("gpt/torch", "iter_0000010/mp_rank_00/model_optim_rng.pt", fuzz::Rounds(100), 5); }

TEST(PickleFuzz, Pickles) {
  const std::string whole = [] {
    std::ifstream file(fmt::format("{}/fixtures/megatron/gpt/torch_dist/iter_0000010/.metadata", MB_BINARY_DIR),
                       std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }();
  ASSERT_FALSE(whole.empty());
  fuzz::Mutator mutate(6);
  int read = 0;
  for (int round = 0; round < fuzz::Rounds(2000); ++round) read += ReadPickle(mutate(whole), "fuzz").ok();
  // Bytes that are all operations.
  std::string codes =
      ".N\x88(])}atesbRq\x94h\x85\x86\x87\x81\x93Q0"
      "1du";
  for (int round = 0; round < fuzz::Rounds(5000); ++round) {
    std::string text = "\x80\x04";
    for (uint64_t i = mutate.Below(60); i > 0; --i) text.push_back(codes[mutate.Below(codes.size())]);
    const auto pickle = ReadPickle(text + ".", "fuzz");
    read += pickle.ok();
    if (pickle.ok()) ModelOfArguments(*pickle->root).status().IgnoreError();
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace mbridge
