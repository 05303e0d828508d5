// Conversions as jobs: import, train from what was imported, export, verify.
#include <algorithm>
#include <cmath>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
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

  // Checkpoints that megatron-core wrote.
  static std::string Megatron(const std::string& name) {
    return (std::filesystem::path(MB_BINARY_DIR) / "fixtures" / "megatron" / name).string();
  }
  static Arguments ImportMegatron(const std::string& source, const std::string& to, const Arguments& more = {"--wait"}) {
    Arguments arguments = {"convert", "import", "--megatron", source, "--to", to};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
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

// What `--hf` adds to a job that trains a few steps of an imported fixture.
Arguments FromModel(const std::string& model, const std::string& checkpoint, const std::string& run, const Arguments& more = {}) {
  Arguments arguments = {"--hf",
                         model,
                         "--device",
                         "cpu",
                         "--name",
                         run,
                         "train.train_iters=2",
                         "train.global_batch_size=4",
                         "train.micro_batch_size=2",
                         "validation.eval_iters=0",
                         "model.seq_length=32",
                         "dataset.seq_length=32",
                         "scheduler.lr_warmup_iters=0",
                         "logger.log_interval=1",
                         "mixed_precision=null"};
  if (!checkpoint.empty()) arguments.insert(arguments.end(), {"--start", "fork", "--from", checkpoint, "--weights-only"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Arguments Plan(const std::string& model, Arguments flags) {
  Arguments arguments = FromModel(model, "", "plan", {"--dry-run"});
  arguments.insert(arguments.begin(), "submit");
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return arguments;
}

// The recipe comes from the model's directory, the weights from its import: dense, experts, latent attention with experts.
TEST_F(ConvertTest, TrainsWhatWasImported) {
  for (const std::string name : {"llama_tied_rope3", "qwen3_moe", "deepseek_v2_lite"}) {
    ASSERT_THAT(Import(name, name), Exited(0));
    const std::string model = Fixture(name).string();
    const v1::Job tuned = service_.WaitForEnd(service_.Submit(FromModel(model, name + "@0", name + "-tuned")));
    const v1::Job fresh = service_.WaitForEnd(service_.Submit(FromModel(model, "", name + "-fresh")));
    ASSERT_EQ(tuned.state(), v1::JOB_STATE_SUCCEEDED) << name << ": " << tuned.detail();
    ASSERT_EQ(fresh.state(), v1::JOB_STATE_SUCCEEDED) << name << ": " << fresh.detail();
    EXPECT_EQ(tuned.resolved().recipe(), "from_hf");
    EXPECT_THAT(tuned.spec().config_yaml(), HasSubstr("base: from_hf")) << "the job says by itself what it trains";
    const auto points = service_.TrainPoints(tuned.job_id()), others = service_.TrainPoints(fresh.job_id());
    ASSERT_THAT(points, SizeIs(2));
    ASSERT_THAT(others, SizeIs(2));
    EXPECT_NEAR(points[0].lm_loss(), std::log(320.0), 0.3) << name << ": small random weights guess evenly";
    EXPECT_NE(points[0].lm_loss(), others[0].lm_loss()) << name << ": the weights are not those that were imported";
  }
}

// Layers with other mixers: trained, saved, resumed, exported, and computed again layer by layer, always to the same bits.
TEST_F(ConvertTest, TrainsResumesAndExportsOtherMixers) {
  for (const std::string name : {"mamba2", "falcon_h1", "nemotron_h", "qwen3_next"}) {
    SCOPED_TRACE(name);
    ASSERT_THAT(Import(name, name), Exited(0));
    const std::string model = Fixture(name).string(), run = name + "-run";
    const auto train = [&](const std::string& as, const Arguments& more) {
      Arguments arguments = FromModel(model, name + "@0", as, more);
      std::replace(arguments.begin(), arguments.end(), std::string("train.train_iters=2"), std::string("train.train_iters=4"));
      const v1::Job job = service_.WaitForEnd(service_.Submit(arguments));
      EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
      return service_.TrainPoints(job.job_id());
    };
    const auto straight = train(name + "-straight", {});
    const auto again = train(
        name + "-again", {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"});
    const auto first = train(run, {"train.exit_interval=2"});
    ASSERT_THAT(straight, SizeIs(4));
    ASSERT_THAT(again, SizeIs(4));
    ASSERT_THAT(first, SizeIs(2));
    Arguments resume = FromModel(model, "", run, {"--start", "resume"});
    std::replace(resume.begin(), resume.end(), std::string("train.train_iters=2"), std::string("train.train_iters=4"));
    const v1::Job resumed = service_.WaitForEnd(service_.Submit(resume));
    ASSERT_EQ(resumed.state(), v1::JOB_STATE_SUCCEEDED) << resumed.detail();
    const auto second = service_.TrainPoints(resumed.job_id());
    ASSERT_THAT(second, SizeIs(2));
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(again[i].lm_loss(), straight[i].lm_loss()) << i;
      EXPECT_EQ((i < 2 ? first[i] : second[i - 2]).lm_loss(), straight[i].lm_loss()) << i;
      EXPECT_EQ((i < 2 ? first[i] : second[i - 2]).grad_norm(), straight[i].grad_norm()) << i;
    }
    const std::filesystem::path root = service_.Checkpoints(run)[0].path();
    const std::string target = (root.parent_path().parent_path().parent_path() / (name + "-hf")).string();
    const CommandResult exported = service_.Mbctl({"convert", "export", "--from", run + "@4", "--hf", target, "--wait"});
    ASSERT_THAT(exported, Exited(0)) << exported.err;
    EXPECT_EQ(ReadFile(target + "/config.json"), ReadFile(Fixture(name) / "config.json"));
    EXPECT_THAT(service_.Mbctl({"convert", "verify", "--from", run + "@4", "--hf", target, "--wait"}), Exited(0));
    EXPECT_THAT(service_.Mbctl({"convert", "verify", "--from", name + "@0", "--hf", target, "--wait"}), Exited(1))
        << "it was trained";
  }
}

TEST_F(ConvertTest, RecipeOfAModel) {
  const std::string model = Fixture("qwen3").string();
  const CommandResult shown = service_.Mbctl({"recipe", "show", "from_hf", "--hf", model, "model.seq_length=64"});
  ASSERT_THAT(shown, Exited(0)) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr("model.qk_layernorm"));
  EXPECT_THAT(shown.out, HasSubstr("different from Megatron-Bridge's recipe"));
  const CommandResult planned = service_.Mbctl(Plan(model, {}));
  ASSERT_THAT(planned, Exited(0)) << planned.err;
  EXPECT_THAT(planned.out, HasSubstr("model.num_query_groups"));
  const CommandResult local = service_.Mbctl(Plan(model, {"--local"}));
  ASSERT_THAT(local, Exited(0)) << local.err;
  EXPECT_THAT(local.out, HasSubstr("model.num_query_groups"));

  const CommandResult nothing = service_.Mbctl(Plan("/no/such/model", {}));
  EXPECT_THAT(nothing, Exited(2));
  EXPECT_THAT(nothing.err, HasSubstr("/no/such/model"));
  const CommandResult without = service_.Mbctl({"submit", "--recipe", "from_hf"});
  EXPECT_THAT(without, Exited(2));
  EXPECT_THAT(without.err, HasSubstr("--hf DIR"));
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
  EXPECT_THAT(nothing, Exited(2));
  EXPECT_THAT(nothing.err, HasSubstr("hf download no-such-org/no-such-model"));
  EXPECT_THAT(nothing.err, HasSubstr("spec.convert.hugging_face"));
  EXPECT_THAT(nothing.err, Not(HasSubstr("mbctl ckpt ls"))) << "it is not about checkpoints";

  ASSERT_THAT(Import("qwen2", "base"), Exited(0));
  EXPECT_THAT(Import("qwen2", "base"), Exited(8)) << "the run has a checkpoint";
  const CommandResult outside = service_.Mbctl({"convert", "export", "--from", "base@0", "--hf", "/etc/model", "--wait"});
  EXPECT_THAT(outside, Exited(2));
  EXPECT_THAT(outside.err, HasSubstr("roots"));
  EXPECT_THAT(service_.Mbctl({"convert", "export", "--from", "base@7", "--hf", "/etc/model", "--wait"}), Exited(3));
}

TEST_F(ConvertTest, MegatronImportTrainExport) {
  const CommandResult listed = service_.Mbctl({"convert", "inspect", "--megatron", Megatron("llama/torch")});
  EXPECT_THAT(listed, Exited(0)) << listed.err;
  EXPECT_THAT(listed.out, HasSubstr("-> decoder.layers.3.mlp.linear_fc1.weight"));
  const CommandResult planned = service_.Mbctl(ImportMegatron(Megatron("llama/torch_dist"), "base", {"--dry-run"}));
  EXPECT_THAT(planned, Exited(0)) << planned.err;
  EXPECT_THAT(planned.out, HasSubstr("gpt (Megatron-LM, torch_dist)"));
  EXPECT_THAT(service_.Checkpoints("base"), IsEmpty());

  const CommandResult import = service_.Mbctl(ImportMegatron(Megatron("llama/torch_dist"), "base"));
  ASSERT_THAT(import, Exited(0)) << import.err;
  const auto imported = service_.Checkpoints("base");
  ASSERT_THAT(imported, SizeIs(1));
  EXPECT_EQ(imported[0].checkpoint_id(), "base@0");
  EXPECT_TRUE(SoundEvents(service_.Events(imported[0].job_id())));
  EXPECT_THAT(service_.Mbctl({"logs", imported[0].job_id()}).out, HasSubstr("import: 27 of 27 tensors"));
  for (const char* layout : {"llama/torch_dist", "llama/torch"})
    EXPECT_THAT(service_.Mbctl({"convert", "verify", "--from", "base@0", "--megatron", Megatron(layout), "--wait"}), Exited(0));

  // An import says all of the model, so that an export has the arguments of the first training again.
  const auto runs = std::filesystem::path(imported[0].path()).parent_path().parent_path().parent_path();
  const std::string unchanged = (runs / "base-megatron").string(), target = (runs / "tuned-megatron").string();
  ASSERT_THAT(service_.Mbctl({"convert", "export", "--from", "base@0", "--megatron", unchanged, "--wait"}), Exited(0));
  constexpr char kTrue = '\x88';
  EXPECT_THAT(ReadFile(unchanged + "/release/common.pt"), HasSubstr(std::string("bias_swiglu_fusion") + kTrue));

  const Arguments model = {"--name",
                           "tuned",
                           "--start",
                           "fork",
                           "--from",
                           "base@0",
                           "--weights-only",
                           "model.num_layers=4",
                           "model.hidden_size=32",
                           "model.num_attention_heads=4",
                           "model.num_query_groups=2",
                           "model.ffn_hidden_size=48",
                           "model.normalization=RMSNorm",
                           "model.gated_linear_unit=true",
                           "model.activation_func=silu",
                           "model.add_bias_linear=false",
                           "model.position_embedding_type=rope",
                           "model.share_embeddings_and_output_weights=false",
                           "model.make_vocab_size_divisible_by=64",
                           "tokenizer.vocab_size=60"};
  const v1::Job trained = service_.WaitForEnd(service_.Submit(TinyJob(2, model)));
  ASSERT_EQ(trained.state(), v1::JOB_STATE_SUCCEEDED) << trained.detail();
  const CommandResult exported = service_.Mbctl({"convert", "export", "--from", "tuned@2", "--megatron", target, "--wait"});
  ASSERT_THAT(exported, Exited(0)) << exported.err;
  EXPECT_EQ(ReadFile(target + "/latest_checkpointed_iteration.txt"), "2");
  EXPECT_THAT(service_.Mbctl({"convert", "verify", "--from", "base@0", "--megatron", target, "--wait"}), Exited(1))
      << "the trained weights are others";
  // The optimizer's state is not a part of it: what comes back are the weights, and they are the same.
  const CommandResult again = service_.Mbctl(ImportMegatron(target, "again"));
  ASSERT_THAT(again, Exited(0)) << again.err;
  EXPECT_THAT(service_.Mbctl({"convert", "verify", "--from", "tuned@2", "--megatron", target, "--wait"}), Exited(0));
}

TEST_F(ConvertTest, MegatronImportStopsAndGoesOn) {
  Service slow(Service::Options{.environment = {{"MB_FAILPOINTS", "checkpoint.tensor=sleep:200"}}});
  ASSERT_TRUE(slow.Start()) << slow.log_text();
  const CommandResult started = slow.Mbctl(ImportMegatron(Megatron("llama/torch"), "base", {}));
  ASSERT_THAT(started, Exited(0)) << started.err;
  const std::string id = started.out.substr(0, started.out.find('\n'));
  ASSERT_TRUE(WaitUntil(
      [&] {
        return slow.Mbctl({"logs", id}).out.find("import: 0 of 27 tensors") != std::string::npos;
      },
      Seconds(30)));
  ASSERT_THAT(slow.Mbctl({"cancel", id}), Exited(0));
  const v1::Job job = slow.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED) << job.detail();
  EXPECT_EQ(job.reason(), v1::REASON_CANCELLED_BY_USER);
  EXPECT_THAT(slow.Checkpoints("base"), IsEmpty());
  EXPECT_TRUE(slow.NoneLeft("mbrank"));
  const CommandResult again = slow.Mbctl(ImportMegatron(Megatron("llama/torch"), "base"));
  EXPECT_THAT(again, Exited(0)) << again.err;
  EXPECT_THAT(slow.Checkpoints("base"), SizeIs(1));
}

TEST_F(ConvertTest, MegatronRefusals) {
  const std::string nothing = (service_.directory() / "nothing").string();
  const CommandResult missing = service_.Mbctl(ImportMegatron(nothing, "base"));
  EXPECT_THAT(missing, Exited(2));
  EXPECT_THAT(missing.err, HasSubstr("latest_checkpointed_iteration.txt"));
  EXPECT_THAT(missing.err, HasSubstr("spec.convert.megatron"));

  ASSERT_THAT(service_.Mbctl(ImportMegatron(Megatron("gpt/torch_dist"), "base")), Exited(0));
  EXPECT_THAT(service_.Mbctl(ImportMegatron(Megatron("gpt/torch_dist"), "base")), Exited(8)) << "the run has a checkpoint";
  const CommandResult outside = service_.Mbctl({"convert", "export", "--from", "base@0", "--megatron", "/etc/model", "--wait"});
  EXPECT_THAT(outside, Exited(2));
  EXPECT_THAT(outside.err, HasSubstr("roots"));

  Service rooted(Service::Options{.extra_arguments = {"--data-root", Megatron("gpt")}});
  ASSERT_TRUE(rooted.Start()) << rooted.log_text();
  EXPECT_THAT(rooted.Mbctl(ImportMegatron(Megatron("gpt/torch_dist"), "inside")), Exited(0));
  const CommandResult other = rooted.Mbctl(ImportMegatron(Megatron("llama/torch_dist"), "outside"));
  EXPECT_THAT(other, Exited(2));
  EXPECT_THAT(other.err, HasSubstr("spec.convert.megatron"));
  EXPECT_THAT(other.err, HasSubstr("roots"));
  // A link inside a root that leads out of it: the node refuses what the coordinator cannot see.
  const std::filesystem::path runs = rooted.state_directory() / "runs";
  std::filesystem::create_directories(runs);
  std::filesystem::create_directory_symlink(Megatron("llama/torch_dist"), runs / "link");
  const CommandResult linked = rooted.Mbctl(ImportMegatron((runs / "link").string(), "linked"));
  EXPECT_THAT(linked, Exited(2));
  EXPECT_THAT(linked.err, HasSubstr("roots"));
}

}  // namespace
}  // namespace mbridge::e2e
