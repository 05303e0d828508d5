#include "engine/bridge/conversion.h"

#include <algorithm>

#include "engine/bridge/conversion_test_support.h"
#include "engine/bridge/family_table_test_support.h"

namespace mbridge {
namespace {

using testing::Values;

class ConversionOf : public ConversionTest, public testing::WithParamInterface<std::string> {};

TEST_P(ConversionOf, ThereAndBackBitForBit) {
  const std::string source = Fixture(GetParam());
  int64_t calls = 0;
  ConversionProgress last;
  const auto saved = RunImport(Import(source), {.progress = [&](const ConversionProgress& progress) {
                                 ++calls;
                                 last = progress;
                               }});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(last.tensors, saved->tensors);
  EXPECT_EQ(last.bytes, last.total_bytes);
  EXPECT_GE(calls, saved->tensors);
  ASSERT_TRUE(VerifyCheckpoint(saved->path, saved->manifest_hash).ok());

  const auto verified = VerifyConversion({.checkpoint = saved->path,
                                          .manifest_hash = saved->manifest_hash,
                                          .source = source,
                                          .roots = {},
                                          .logits = source + "/reference.safetensors"},
                                         {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(verified->different.empty());
  EXPECT_LE(verified->logits_difference.value_or(1), 1e-4);
  SawOfFamily(GetParam(), "import", !HasFailure());

  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->files, 1);
  for (const char* file : {"config.json", "generation_config.json"}) {
    EXPECT_EQ(Read(source + "/" + file), Read(exported->path + "/" + file)) << file;
  }
  const auto theirs = ReadAll(source + "/model.safetensors"), ours = ReadAll(exported->path + "/model.safetensors");
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_EQ(theirs[i].tensor.name, ours[i].tensor.name) << "the order is that of the source";
    EXPECT_EQ(theirs[i].tensor.dtype, ours[i].tensor.dtype);
    EXPECT_EQ(theirs[i].tensor.shape, ours[i].tensor.shape);
    EXPECT_TRUE(theirs[i].bytes == ours[i].bytes) << theirs[i].tensor.name;
  }
  SawOfFamily(GetParam(), "export", !HasFailure());
}

INSTANTIATE_TEST_SUITE_P(Forms, ConversionOf, Values("llama_bf16", "llama_attention_bias"),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Families, ConversionOf, testing::ValuesIn(FamilyFixtures()),
                         [](const auto& info) { return info.param; });

TEST_F(ConversionTest, FilesWithoutThePrefixOfTheModel) {
  const std::string source = Copy("gpt2");
  auto all = ReadAll(source + "/model.safetensors");
  const std::string prefix = "transformer.";
  for (Stored& stored : all) stored.tensor.name.erase(0, stored.tensor.name.starts_with(prefix) ? prefix.size() : 0);
  all.push_back({{"h.0.attn.bias", "F32", {1, 1, 2, 2}, 16}, std::string(16, '\0')});
  WriteAll(source + "/model.safetensors", all);
  const auto plan = PlanImport(Import(source));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->skipped, std::vector<std::string>{"h.0.attn.bias: not needed, it follows from config.json"});
  ASSERT_TRUE(RunImport(Import(source), {}).ok());
  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  all.pop_back();
  const auto ours = ReadAll(exported->path + "/model.safetensors");
  ASSERT_EQ(ours.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(ours[i].tensor.name, all[i].tensor.name);
    EXPECT_TRUE(ours[i].bytes == all[i].bytes) << all[i].tensor.name;
  }
}

TEST_F(ConversionTest, LayersThatPredictFurtherTokensAreSkipped) {
  const std::string source = Copy("deepseek_v3");
  const Json config = ReadJson(source + "/config.json");
  const std::string layer = fmt::format("model.layers.{}.", config["num_hidden_layers"].get<int>());
  auto all = ReadAll(source + "/model.safetensors");
  for (const char* name : {"eh_proj.weight", "mlp.gate.weight"}) {
    all.push_back({{layer + name, "F32", {2, 2}, 16}, std::string(16, '\0')});
  }
  WriteAll(source + "/model.safetensors", all);
  SetKey(source, "num_nextn_predict_layers", 0);
  EXPECT_NE(Refusal(source).find(layer + "mlp.gate.weight"), std::string::npos);
  SetKey(source, "num_nextn_predict_layers", 1);
  const auto plan = PlanImport(Import(source));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->skipped.size(), 2U);
  EXPECT_NE(plan->skipped[0].find("further tokens"), std::string::npos) << plan->skipped[0];
}

TEST_F(ConversionTest, ManyFilesWithAFreshIndex) {
  ASSERT_TRUE(RunImport(Import(Fixture("llama_untied")), {}).ok());
  ExportOptions options = Export();
  options.shard_bytes = 100'000;
  const auto exported = RunExport(options, {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_GT(exported->files, 3);
  const Json index = ReadJson(exported->path + "/" + kIndexName);
  EXPECT_EQ(index["metadata"]["total_size"], exported->bytes);
  EXPECT_EQ(static_cast<int>(index["weight_map"].size()), exported->tensors);
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    const auto opened = SafetensorsFile::Open(exported->path + "/" + file.get<std::string>());
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_NE(opened->Find(tensor), nullptr) << tensor;
    EXPECT_EQ(opened->metadata().at("format"), "pt");
  }
  const auto verified = VerifyConversion(
      {.checkpoint = Path("checkpoint"), .manifest_hash = "", .source = exported->path, .roots = {}, .logits = ""}, {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(verified->different.empty());
}

TEST_F(ConversionTest, VerifyNamesWhatDiffers) {
  const std::string source = Copy("qwen2");
  ASSERT_TRUE(RunImport(Import(source), {}).ok());
  auto all = ReadAll(source + "/model.safetensors");
  const auto damaged = std::find_if(all.begin(), all.end(), [](const Stored& stored) {
    return stored.tensor.name == "model.layers.1.self_attn.k_proj.weight";
  });
  ASSERT_NE(damaged, all.end());
  damaged->bytes[100] ^= 1;
  WriteAll(source + "/model.safetensors", all);
  const auto verified =
      VerifyConversion({.checkpoint = Path("checkpoint"), .manifest_hash = "", .source = source, .roots = {}, .logits = ""}, {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->different, std::vector<std::string>{"model.layers.1.self_attn.k_proj.weight"});
}

TEST_F(ConversionTest, PaddedVocabularyIsCutAgain) {
  ImportOptions options = Import(Fixture("llama_untied"));
  options.vocab_multiple = 256;
  const auto plan = PlanImport(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->vocab_size, 320);
  EXPECT_EQ(plan->model.padded_vocab_size, 512);
  ASSERT_TRUE(RunImport(options, {}).ok());
  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(Read(Fixture("llama_untied") + "/model.safetensors").size(), Read(exported->path + "/model.safetensors").size());
  EXPECT_EQ(ReadJson(exported->path + "/config.json")["vocab_size"], 320);
  options.vocab_multiple = 0;
  EXPECT_FALSE(PlanImport(options).ok());
}

TEST_F(ConversionTest, AnotherTypeOnRequest) {
  ImportOptions import = Import(Fixture("mistral"));
  import.dtype = DType::kBF16;
  ASSERT_TRUE(RunImport(import, {}).ok());
  ExportOptions options = Export();
  options.dtype = DType::kBF16;
  const auto exported = RunExport(options, {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(ReadJson(exported->path + "/config.json")["dtype"], "bfloat16");
  for (const auto& stored : ReadAll(exported->path + "/model.safetensors")) EXPECT_EQ(stored.tensor.dtype, "BF16");
}

TEST_F(ConversionTest, OldFormOfConfigComesBackAsItWas) {
  const std::string source = Copy("llama_tied_rope3");
  const Json modern = ReadJson(source + "/config.json");
  const Json old = InFormOf({{"torch_dtype", "float32"}, {"rope_theta", 1}, {"rope_scaling", {{"rope_type", "llama3"}}}}, modern);
  EXPECT_EQ(old["rope_scaling"]["factor"], 32.0);
  Write(source + "/config.json", old.dump());
  ASSERT_TRUE(RunImport(Import(source), {}).ok());
  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(Read(exported->path + "/config.json"), old.dump());
}

TEST_F(ConversionTest, StopsBetweenTensorsAndGoesOn) {
  std::atomic<bool> stop{false};
  const ConversionObserver stopping{.progress = [&](const ConversionProgress& progress) { stop = progress.tensors == 5; },
                                    .stop = &stop};
  const auto stopped = RunImport(Import(Fixture("qwen3")), stopping);
  EXPECT_EQ(ReasonOf(stopped.status()), v1::REASON_CANCELLED_BY_USER) << stopped.status();
  EXPECT_FALSE(std::filesystem::exists(Path("checkpoint")));
  ASSERT_TRUE(RunImport(Import(Fixture("qwen3")), {}).ok());

  ExportOptions options = Export();
  options.shard_bytes = 60'000;
  int64_t written = 0;
  const ConversionObserver later{.progress =
                                     [&](const ConversionProgress& progress) {
                                       written = progress.tensors;
                                       stop = progress.tensors >= 12;
                                     },
                                 .stop = &stop};
  stop = false;
  EXPECT_EQ(ReasonOf(RunExport(options, later).status()), v1::REASON_CANCELLED_BY_USER);
  EXPECT_FALSE(std::filesystem::exists(Path("exported")));
  int64_t first = -1;
  const auto exported = RunExport(options, {.progress = [&](const ConversionProgress& progress) {
                                    if (first < 0) first = progress.tensors;
                                  }});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_GT(first, 4) << "finished files are not written again";
  EXPECT_FALSE(std::filesystem::exists(Path(".tmp-exported")));
  const auto verified = VerifyConversion(
      {.checkpoint = Path("checkpoint"), .manifest_hash = "", .source = exported->path, .roots = {}, .logits = ""}, {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(verified->different.empty());
  EXPECT_TRUE(absl::IsAlreadyExists(RunExport(options, {}).status()));
  EXPECT_TRUE(absl::IsAlreadyExists(RunImport(Import(Fixture("qwen3")), {}).status()));
}

TEST_F(ConversionTest, CheckpointOfUnknownSourceNeedsAModelLikeIt) {
  ASSERT_TRUE(RunImport(Import(Fixture("qwen3")), {}).ok());
  std::filesystem::remove_all(Path("checkpoint") + "/" + kHuggingFaceFolder);
  const auto refused = RunExport(Export(), {});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("--like"), std::string::npos) << refused.status();
  EXPECT_EQ(FieldViolationsOf(refused.status()).at(0).field, "like");

  ExportOptions options = Export();
  options.like = Fixture("llama_untied");
  const auto other = RunExport(options, {});
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.status().message().find("decoder.layers.0"), std::string::npos) << other.status();
  EXPECT_EQ(FieldViolationsOf(other.status()).at(0).field, "checkpoint");
  options.like = Path("nowhere");
  const auto nowhere = RunExport(options, {});
  EXPECT_EQ(ReasonOf(nowhere.status()), v1::REASON_INVALID_REQUEST) << nowhere.status();
  EXPECT_EQ(FieldViolationsOf(nowhere.status()).at(0).field, "like");
  options.like = Fixture("qwen3");
  EXPECT_TRUE(RunExport(options, {}).ok());

  // From nothing but the model's own configuration.
  const auto plan = PlanImport(Import(Fixture("qwen3")));
  ASSERT_TRUE(plan.ok());
  options.like.clear();
  options.path = Path("scratch");
  options.model_type = "qwen3";
  options.model = plan->model;
  const auto scratch = RunExport(options, {});
  ASSERT_TRUE(scratch.ok()) << scratch.status();
  const Json config = ReadJson(scratch->path + "/config.json");
  EXPECT_EQ(config["architectures"][0], "Qwen3ForCausalLM");
  EXPECT_EQ(config["dtype"], "float32");
  EXPECT_EQ(config["head_dim"], 32);
}

}  // namespace
}  // namespace mbridge
