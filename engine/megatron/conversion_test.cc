#include "engine/megatron/conversion.h"

#include <set>

#include <gmock/gmock.h>

#include "engine/bridge/source_record.h"
#include "engine/megatron/conversion_test_support.h"
#include "engine/megatron/pickle_writer.h"
#include "engine/megatron/stored_model.h"

namespace mbridge {
namespace {

using testing::Contains;
using testing::HasSubstr;

// The whole tensors as megatron-core put them together, by our names.
std::map<std::string, std::string> WholeTensors(const std::string& path) {
  std::map<std::string, std::string> tensors;
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return tensors;
  for (const SafetensorsEntry& entry : file->entries()) {
    std::string name = entry.name, bytes(static_cast<size_t>(entry.bytes), '\0');
    EXPECT_TRUE(file->Read(entry, bytes.data()).ok());
    const std::string local = "local_experts.";
    if (const size_t at = name.find(local); at != std::string::npos) {
      const size_t dot = name.find('.', at + local.size());
      const std::string expert = name.substr(at + local.size(), dot - at - local.size());
      name = name.substr(0, at) + name.substr(dot + 1) + expert;
    }
    Shape shape;
    for (const int64_t size : entry.shape) shape.Append(size);
    tensors[name] = shape.ToString() + entry.dtype + bytes;
  }
  return tensors;
}

struct Case {
  const char* model;
  const char* layout;
};

class Layouts : public MegatronTest, public testing::WithParamInterface<Case> {
 protected:
  std::string Source() const { return Fixture(fmt::format("{}/{}", GetParam().model, GetParam().layout)); }
};

TEST_P(Layouts, ImportsWhatMegatronCoreLoads) {
  const auto saved = RunMegatronImport(Import(Source()), {});
  ASSERT_TRUE(saved.ok()) << saved.status();
  const auto expected = WholeTensors(Fixture(std::string(GetParam().model) + "/whole.safetensors"));
  const Tensors imported = TensorsOf(Path("checkpoint"));
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(imported.contains(name)) << name;
    EXPECT_TRUE(imported.at(name) == value) << name << " differs";
  }
  EXPECT_EQ(imported.size(), expected.size());

  const auto verified = VerifyMegatronConversion(
      {.checkpoint = Path("checkpoint"), .manifest_hash = "", .source = Source(), .like = "", .roots = {}, .logits = ""}, {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(verified->different.empty());
  EXPECT_EQ(verified->tensors, static_cast<int64_t>(expected.size()));
}

INSTANTIATE_TEST_SUITE_P(All, Layouts,
                         testing::ValuesIn(std::vector<Case>{{"gpt", "torch_dist"},
                                                             {"gpt", "torch"},
                                                             {"llama", "torch_dist"},
                                                             {"llama", "torch"},
                                                             {"tied", "torch_dist"},
                                                             {"tied", "torch"}}),
                         [](const auto& info) { return fmt::format("{}_{}", info.param.model, info.param.layout); });

class Exports : public MegatronTest, public testing::WithParamInterface<const char*> {};

TEST_P(Exports, ComeBackAndHaveTheKeysOfMegatronCore) {
  const std::string source = Fixture(std::string(GetParam()) + "/torch_dist");
  MegatronImportOptions import = Import(source);
  const auto plan = PlanMegatronImport(import);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(RunMegatronImport(import, {}).ok());
  MegatronExportOptions options;
  options.checkpoint = Path("checkpoint");
  options.path = Path("exported");
  options.model = plan->model;
  const auto exported = RunMegatronExport(options, {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(RunMegatronExport(options, {}).status().code(), absl::StatusCode::kAlreadyExists);

  const auto again = PlanMegatronImport(Import(Path("exported"), "again"));
  ASSERT_TRUE(again.ok()) << again.status();
  GptConfig model = again->model, expected = plan->model;
  EXPECT_TRUE(model == expected) << "the arguments say the same model";
  ASSERT_TRUE(RunMegatronImport(Import(Path("exported"), "again"), {}).ok());
  EXPECT_TRUE(TensorsOf(Path("again")) == TensorsOf(Path("checkpoint")));

  const auto theirs = OpenStoredModel(source, {}), ours = OpenStoredModel(Path("exported"), {});
  ASSERT_TRUE(theirs.ok() && ours.ok());
  EXPECT_EQ(ours->iteration, "release");
  for (const auto& [key, tensor] : theirs->tensors) {
    ASSERT_TRUE(ours->tensors.contains(key)) << key;
    EXPECT_EQ(ours->tensors.at(key).shape, tensor.shape) << key;
    EXPECT_EQ(ours->tensors.at(key).type, tensor.type) << key;
  }
  EXPECT_GE(ours->other_objects, theirs->other_objects);
}

INSTANTIATE_TEST_SUITE_P(All, Exports, testing::Values("gpt", "llama", "tied"),
                         [](const auto& info) { return std::string(info.param); });

// Parts of models of which there is no sample: experts in all or some layers, latent attention, sinks.
class HuggingFaceModels : public MegatronTest, public testing::WithParamInterface<const char*> {};

TEST_P(HuggingFaceModels, GoToMegatronAndBack) {
  ImportOptions import;
  import.source = fmt::format("{}/fixtures/hf/{}", MB_BINARY_DIR, GetParam());
  import.path = Path("checkpoint");
  ASSERT_TRUE(RunImport(import, {}).ok());
  MegatronExportOptions options;
  options.checkpoint = Path("checkpoint");
  options.path = Path("exported");
  const auto exported = RunMegatronExport(options, {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  const auto plan = PlanMegatronExport(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const ListedTensor& tensor : plan->source) EXPECT_FALSE(tensor.used_by.empty()) << tensor.name;
  const auto again = RunMegatronImport(Import(Path("exported"), "again"), {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(TensorsOf(Path("again")) == TensorsOf(Path("checkpoint")));
}

INSTANTIATE_TEST_SUITE_P(Parts, HuggingFaceModels, testing::Values("qwen3_moe", "deepseek_v2_lite", "deepseek_v3", "gpt_oss"),
                         [](const auto& info) { return std::string(info.param); });

// The model that the arguments say computes what the model did that they were written from.
TEST_F(MegatronTest, LogitsAreComparedToo) {
  const auto reference = [](const char* model) {
    return fmt::format("{}/fixtures/hf/{}/reference.safetensors", MB_BINARY_DIR, model);
  };
  ImportOptions import;
  import.source = std::filesystem::path(reference("llama_untied")).parent_path();
  import.path = Path("checkpoint");
  ASSERT_TRUE(RunImport(import, {}).ok());
  MegatronExportOptions options;
  options.checkpoint = Path("checkpoint");
  options.path = Path("exported");
  ASSERT_TRUE(RunMegatronExport(options, {}).ok());
  MegatronVerifyOptions verify;
  verify.checkpoint = Path("checkpoint");
  verify.source = Path("exported");
  verify.logits = reference("llama_untied");
  const auto verified = VerifyMegatronConversion(verify, {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(verified->different.empty());
  ASSERT_TRUE(verified->logits_difference.has_value());
  EXPECT_LT(*verified->logits_difference, 1e-5);

  verify.logits = reference("llama_tied_rope3");
  const auto others = VerifyMegatronConversion(verify, {});
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_GT(*others->logits_difference, 1e-2) << "those of other weights";
  verify.logits = import.source + "/model.safetensors";
  EXPECT_THAT(std::string(VerifyMegatronConversion(verify, {}).status().message()), HasSubstr("needs a tensor input_ids"));
}

TEST_F(MegatronTest, PlansSayWhatIsNotTaken) {
  const auto plan = PlanMegatronImport(Import(Fixture("gpt/torch_dist")));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->vocab_size, 60);
  EXPECT_EQ(plan->model.padded_vocab_size, 64);
  EXPECT_EQ(plan->model.seq_length, 16);
  EXPECT_THAT(plan->notes, Contains(HasSubstr("iteration 10")));
  EXPECT_THAT(plan->notes, Contains(HasSubstr("objects beside tensors are not taken")));
}

TEST_F(MegatronTest, OneIterationByItsFolderAndAnotherType) {
  MegatronImportOptions options = Import(Fixture("gpt/torch_dist/iter_0000010"));
  options.dtype = DType::kBF16;
  const auto plan = PlanMegatronImport(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->result[0].dtype, "BF16");
  ASSERT_TRUE(RunMegatronImport(options, {}).ok());
}

TEST_F(MegatronTest, RefusesWithTheReasonAndTheWayOut) {
  EXPECT_THAT(Refusal(Import(Path("nothing"))), HasSubstr("latest_checkpointed_iteration.txt"));
  std::filesystem::create_directories(Path("empty"));
  EXPECT_THAT(Refusal(Import(Path("empty"))), HasSubstr("is no checkpoint of Megatron-LM"));
  Write(Path("empty/latest_checkpointed_iteration.txt"), "../../etc");
  EXPECT_THAT(Refusal(Import(Path("empty"))), HasSubstr("says \"../../etc\""));
  MegatronImportOptions unread = Import(Path("empty"));
  unread.roots = {Fixture("gpt")};
  EXPECT_THAT(Refusal(unread), HasSubstr("none of the allowed roots")) << "the file outside was read";

  const std::string source = Copy("gpt/torch_dist"), folder = source + "/iter_0000010";
  MegatronImportOptions outside = Import(source);
  outside.roots = {"/proc"};
  EXPECT_THAT(Refusal(outside), HasSubstr("none of the allowed roots"));
  std::filesystem::remove(folder + "/common.pt");
  EXPECT_THAT(Refusal(Import(source)), HasSubstr("--like"));
  std::filesystem::copy_file(Fixture("gpt/torch_dist/iter_0000010/common.pt"), folder + "/common.pt");
  std::filesystem::remove(folder + "/__0_1.distcp");
  const auto run = RunMegatronImport(Import(source), {});
  EXPECT_THAT(std::string(run.status().message()), HasSubstr("__0_1.distcp"));
  Write(folder + "/metadata.json", R"({"sharded_backend": "zarr", "sharded_backend_version": 1})");
  EXPECT_THAT(Refusal(Import(source)), HasSubstr("zarr"));
  std::filesystem::remove(folder + "/metadata.json");
  EXPECT_THAT(Refusal(Import(source)), HasSubstr("the save did not end"));

  const std::string ranks = Copy("llama/torch", "ranks");
  std::filesystem::remove_all(ranks + "/iter_0000010/mp_rank_01_001");
  EXPECT_THAT(Refusal(Import(ranks)), HasSubstr("3 folders mp_rank_"));
}

TEST_F(MegatronTest, ModelOfAnotherDirectory) {
  // The tensors are not those of config.json, and that is what it says.
  MegatronImportOptions options = Import(Fixture("gpt/torch_dist"));
  options.like = fmt::format("{}/fixtures/hf/llama_untied", MB_BINARY_DIR);
  EXPECT_THAT(Refusal(options), HasSubstr("embedding.word_embeddings.weight has shape [64, 32]"));
}

TEST_F(MegatronTest, ConversionsGoOn) {
  std::atomic<bool> stop = false;
  const ConversionObserver observer{.progress = [&](const ConversionProgress& progress) { stop = progress.tensors >= 4; },
                                    .stop = &stop};
  EXPECT_EQ(RunMegatronImport(Import(Fixture("gpt/torch")), observer).status().code(), absl::StatusCode::kCancelled);
  stop = false;
  ASSERT_TRUE(RunMegatronImport(Import(Fixture("gpt/torch")), {}).ok());
}

}  // namespace
}  // namespace mbridge
