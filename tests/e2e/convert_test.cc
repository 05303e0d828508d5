// Conversions as jobs: import, train from what was imported, export, verify.
#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class ConvertTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }

  static std::filesystem::path Fixture(const std::string& name) {
    return std::filesystem::path(MB_BINARY_DIR) / "fixtures" / "hf" / name;
  }
  CommandResult Import(const std::string& name, const std::string& to) {
    return service_.Mbctl({"convert", "import", "--hf", Fixture(name).string(), "--to", to, "--wait"});
  }

  Service service_;
};

TEST_F(ConvertTest, ImportTrainExport) {
  ASSERT_THAT(Import("llama_untied", "base"), Exited(0));
  const auto imported = service_.Checkpoints("base");
  ASSERT_THAT(imported, SizeIs(1));
  EXPECT_EQ(imported[0].checkpoint_id(), "base@0");
  EXPECT_FALSE(imported[0].has_optimizer_state());
  const v1::Job import_job = service_.GetJob(imported[0].job_id());
  EXPECT_EQ(import_job.spec().kind(), v1::JOB_KIND_CONVERT);
  EXPECT_TRUE(SoundEvents(service_.Events(import_job.job_id())));

  const CommandResult verified =
      service_.Mbctl({"convert", "verify", "--from", "base@0", "--hf", Fixture("llama_untied").string(), "--logits",
                      (Fixture("llama_untied") / "reference.safetensors").string(), "--wait"});
  EXPECT_THAT(verified, Exited(0));

  const Arguments model = {"--name",
                           "tuned",
                           "--start",
                           "fork",
                           "--from",
                           "base@0",
                           "--weights-only",
                           "model.num_layers=2",
                           "model.hidden_size=64",
                           "model.num_attention_heads=4",
                           "model.num_query_groups=2",
                           "model.kv_channels=16",
                           "model.ffn_hidden_size=128",
                           "model.normalization=RMSNorm",
                           "model.gated_linear_unit=true",
                           "model.activation_func=silu",
                           "model.add_bias_linear=false",
                           "model.position_embedding_type=rope",
                           "model.rotary_base=500000",
                           "model.share_embeddings_and_output_weights=false",
                           "model.layernorm_epsilon=1e-6",
                           "model.make_vocab_size_divisible_by=64",
                           "tokenizer.vocab_size=319"};
  const std::string id = service_.Submit(TinyJob(3, model));
  const v1::Job trained = service_.WaitForEnd(id);
  ASSERT_EQ(trained.state(), v1::JOB_STATE_SUCCEEDED) << trained.detail();
  ASSERT_THAT(service_.Checkpoints("tuned"), SizeIs(1));

  const std::string target =
      (std::filesystem::path(imported[0].path()).parent_path().parent_path().parent_path() / "tuned-hf").string();
  const CommandResult exported = service_.Mbctl({"convert", "export", "--from", "tuned@3", "--hf", target, "--wait"});
  ASSERT_THAT(exported, Exited(0)) << exported.err;
  EXPECT_EQ(ReadFile(target + "/generation_config.json"), ReadFile(Fixture("llama_untied") / "generation_config.json"));
  EXPECT_NE(ReadFile(target + "/model.safetensors"), ReadFile(Fixture("llama_untied") / "model.safetensors")) << "it was trained";
  const CommandResult differs = service_.Mbctl({"convert", "verify", "--from", "base@0", "--hf", target, "--wait"});
  EXPECT_THAT(differs, Exited(1)) << "the trained weights are others";
  EXPECT_EQ(service_.Checkpoints("base")[0].state(), v1::CHECKPOINT_STATE_COMMITTED)
      << "which does not make the checkpoint corrupt";
}

TEST_F(ConvertTest, RefusalsAndPlans) {
  const CommandResult plan =
      service_.Mbctl({"convert", "import", "--hf", Fixture("qwen2").string(), "--to", "base", "--dry-run"});
  EXPECT_THAT(plan, Exited(0));
  EXPECT_THAT(plan.out, HasSubstr("model_type qwen2"));
  EXPECT_THAT(service_.Checkpoints("base"), IsEmpty());

  const CommandResult listed = service_.Mbctl({"convert", "inspect", "--hf", Fixture("qwen2").string()});
  EXPECT_THAT(listed, Exited(0));
  EXPECT_THAT(listed.out, HasSubstr("model.layers.0.self_attn.k_proj.bias -> decoder.layers.0.self_attention.linear_qkv.bias"));

  const CommandResult nothing =
      service_.Mbctl({"convert", "import", "--hf", "no-such-org/no-such-model", "--to", "base", "--wait"});
  EXPECT_THAT(nothing, Exited(3));
  EXPECT_THAT(nothing.err, HasSubstr("hf download no-such-org/no-such-model"));

  ASSERT_THAT(Import("qwen2", "base"), Exited(0));
  EXPECT_THAT(Import("qwen2", "base"), Exited(8)) << "the run has a checkpoint";
  const CommandResult outside = service_.Mbctl({"convert", "export", "--from", "base@0", "--hf", "/etc/model", "--wait"});
  EXPECT_THAT(outside, Exited(2));
  EXPECT_THAT(outside.err, HasSubstr("roots"));
  EXPECT_THAT(service_.Mbctl({"convert", "export", "--from", "base@7", "--hf", "/etc/model", "--wait"}), Exited(3));
}

}  // namespace
}  // namespace mbridge::e2e
