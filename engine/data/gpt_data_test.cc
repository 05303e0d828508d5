#include "engine/data/gpt_data.h"

#include <filesystem>

#include <gmock/gmock.h>

#include "engine/core/error.h"
#include "engine/data/blended_dataset.h"
#include "engine/data/gpt_dataset.h"
#include "engine/data/indexed_writer.h"
#include "engine/data/test_support.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using testing::ElementsAreArray;
using testing::HasSubstr;
using testing_data::MlmPath;
using testing_data::Oracle;
using testing_data::ReadAll;
using testing_data::Sha256;
using testing_data::TemporaryFolder;

GptDataConfig MockRun(int64_t sequence_length, int64_t vocab_size, int64_t train, int64_t valid, int64_t test) {
  GptDataConfig config;
  config.mock = true;
  config.sequence_length = sequence_length;
  config.vocab_size = vocab_size;
  config.train_samples = train;
  config.valid_samples = valid;
  config.test_samples = test;
  return config;
}

// Tokens and the last label of the first `count` samples, as int32.
std::string HashOfTexts(const Dataset& dataset, int64_t count) {
  Batch batch(1, dataset.sequence_length());
  Sha256 hash;
  for (int64_t i = 0; i < count; ++i) {
    dataset.Get(i, batch.Row(0));
    hash.Add(std::span<const int32_t>(batch.tokens));
    hash.Add(std::span<const int32_t>(batch.labels).last(1));
  }
  return hash.Hex();
}

TEST(MockDataTest, RunAEqualsMegatron) {
  auto data = BuildGptDatasets(MockRun(512, 32000, 320, 128, 64));
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train->size(), 133184);
  EXPECT_EQ(data->valid->size(), 133124);
  EXPECT_EQ(data->test->size(), 133373);
  EXPECT_EQ(HashOfTexts(*data->train, 320), "f24f2b6adb8443e41de211595cb3b26f6fe38fa382d64031d0051555c38de72e");
  EXPECT_EQ(HashOfTexts(*data->valid, 128), "012e75117023647b8db21765a7063a7af098ae8445043f02bd20dc67c9b3dc1f");
  EXPECT_EQ(HashOfTexts(*data->test, 64), "f751ab02e83323b5b6fb5c61b63f7d696204310fba80f43b47f5a2acdfa41be2");

  const auto& train = dynamic_cast<const GptDataset&>(*data->train);
  const auto& valid = dynamic_cast<const GptDataset&>(*data->valid);
  const auto& test = dynamic_cast<const GptDataset&>(*data->test);
  EXPECT_EQ(train.plan().tokens_per_epoch, 68190290);
  EXPECT_EQ(valid.plan().tokens_per_epoch, 68159742);
  EXPECT_EQ(test.plan().tokens_per_epoch, 68287065);
  const auto first = [](auto values, size_t count) { return std::vector<int64_t>(values.begin(), values.begin() + count); };
  EXPECT_THAT(first(train.index().document.values, 8), ElementsAreArray({30903, 11571, 3134, 32473, 27454, 4409, 3622, 19425}));
  EXPECT_THAT(first(train.index().shuffle.values, 8),
              ElementsAreArray({63271, 59107, 2545, 44522, 130998, 59988, 63517, 104282}));
  EXPECT_THAT(first(valid.index().document.values, 4), ElementsAreArray({64237, 44904, 36467, 65807}));
  EXPECT_THAT(first(valid.index().shuffle.values, 4), ElementsAreArray({77948, 46597, 96129, 79197}));
  EXPECT_THAT(first(valid.index().sample.values, 6), ElementsAreArray({0, 0, 1, 301, 1, 813}));
  EXPECT_THAT(first(test.index().document.values, 3), ElementsAreArray({97570, 78238, 69801}));
  EXPECT_THAT(first(test.index().shuffle.values, 4), ElementsAreArray({113528, 36441, 39539, 96588}));
  EXPECT_THAT(first(test.index().sample.values, 8), ElementsAreArray({0, 0, 0, 512, 0, 1024, 1, 82}));
}

TEST(MockDataTest, RunBEqualsMegatron) {
  auto data = BuildGptDatasets(MockRun(1024, 1024, 160, 64, 32));
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train->size(), 66592);
  EXPECT_EQ(HashOfTexts(*data->train, 160), "9d6e06d7890182968c9b9e24ba0880a41fd7be592b5b296fdd20ae7ba67ef25c");
  EXPECT_EQ(HashOfTexts(*data->valid, 64), "ff83d08da0524a54d47ea9b1d25a323f227cc384197e136cbcfde5d98f288b89");
  EXPECT_EQ(HashOfTexts(*data->test, 32), "f823f256a31c35cc9e55100a45bdea62e12e2210bef9672fb4b0f86df6108cf6");
}

// What the oracle runs' loaders fetched, sample by sample.
void CheckRecordedSamples(const std::string& file, const GptDataConfig& config) {
  auto data = BuildGptDatasets(config);
  ASSERT_TRUE(data.ok()) << data.status();
  const auto recorded = nlohmann::json::parse(ReadAll(MlmPath(file)));
  Batch batch(1, config.sequence_length);
  ASSERT_GT(recorded["samples"].size(), 100u);
  for (const auto& sample : recorded["samples"]) {
    const std::string split = sample["split"];
    const Dataset& dataset = split == "Split.train" ? *data->train : split == "Split.valid" ? *data->valid : *data->test;
    dataset.Get(sample["idx"], batch.Row(0));
    const auto head = sample["tokens"].get<std::vector<int32_t>>();
    EXPECT_TRUE(std::equal(head.begin(), head.end(), batch.tokens.begin())) << split << sample["idx"];
    const auto tail = sample["tail"].get<std::vector<int32_t>>();
    EXPECT_TRUE(std::equal(tail.rbegin(), tail.rend(), batch.tokens.rbegin())) << split << sample["idx"];
    const auto labels = sample["labels_tail"].get<std::vector<int32_t>>();
    EXPECT_TRUE(std::equal(labels.rbegin(), labels.rend(), batch.labels.rbegin())) << split << sample["idx"];
    double sum = 0;
    for (float weight : batch.loss_mask) sum += weight;
    EXPECT_EQ(sum, sample["loss_mask_sum"].get<double>());
  }
}

TEST(MockDataTest, RecordedSamplesOfSeed1) { CheckRecordedSamples("seed1_samples.json", MockRun(512, 32000, 320, 128, 64)); }
TEST(MockDataTest, RecordedSamplesOfSeed2) { CheckRecordedSamples("seed2_dp2_samples.json", MockRun(1024, 1024, 160, 64, 32)); }

// --- The 47 recorded configurations on real .bin/.idx files ---

template <class T, class V> void ExpectArray(const nlohmann::json& expected, std::span<const V> values, const char* name) {
  const std::vector<T> copy(values.begin(), values.end());
  EXPECT_EQ(testing_data::Sha256Of(copy), expected["sha256"]) << name;
}

void ExpectPart(const nlohmann::json& expected, const GptDataset& part) {
  SCOPED_TRACE(expected["prefix"].get<std::string>());
  EXPECT_EQ(part.index_options().sequences.begin, expected["sequences"][0]);
  EXPECT_EQ(part.index_options().sequences.end, expected["sequences"][1]);
  const auto& requested = expected["num_samples_requested"];
  EXPECT_EQ(part.index_options().samples, requested.is_null() ? kOneEpoch : requested.get<int64_t>());
  EXPECT_EQ(part.plan().tokens_per_epoch, expected["tokens_per_epoch"]);
  EXPECT_EQ(part.plan().epochs, expected["num_epochs"]);
  EXPECT_EQ(part.plan().separate_final_epoch, expected["separate_final_epoch"]);
  EXPECT_EQ(part.size(), expected["len"]);
  ExpectArray<int32_t>(expected["document_index"], part.index().document.values, "document_index");
  ExpectArray<int32_t>(expected["sample_index"], part.index().sample.values, "sample_index");
  ExpectArray<uint32_t>(expected["shuffle_index"], part.index().shuffle.values, "shuffle_index");
}

std::string AttentionHash(const Batch& batch) {
  const size_t length = static_cast<size_t>(batch.sequence_length);
  std::vector<uint8_t> masked(length * length, 1);
  for (int segment = 0; segment < batch.num_segments[0]; ++segment) {
    const size_t begin = batch.cu_seqlens[segment], end = batch.cu_seqlens[segment + 1];
    for (size_t query = begin; query < end; ++query) {
      for (size_t key = begin; key <= query; ++key) masked[query * length + key] = 0;
    }
  }
  return testing_data::Sha256Of(masked);
}

void ExpectSample(const nlohmann::json& expected, const Batch& batch) {
  const auto wide = [](const std::vector<int32_t>& values) { return std::vector<int64_t>(values.begin(), values.end()); };
  EXPECT_EQ(testing_data::Sha256Of(wide(batch.tokens)), expected["tokens"]["sha256"]);
  EXPECT_EQ(testing_data::Sha256Of(wide(batch.labels)), expected["labels"]["sha256"]);
  EXPECT_EQ(testing_data::Sha256Of(wide(batch.position_ids)), expected["position_ids"]["sha256"]);
  EXPECT_EQ(testing_data::Sha256Of(batch.loss_mask), expected["loss_mask"]["sha256"]);
  if (expected.contains("attention_mask")) {
    EXPECT_EQ(AttentionHash(batch), expected["attention_mask"]["sha256"]);
  }
  if (expected.contains("cu_seqlens")) {
    const auto lengths = expected["cu_seqlens"].get<std::vector<int32_t>>();
    ASSERT_EQ(batch.num_segments[0] + 1, static_cast<int>(lengths.size()));
    EXPECT_TRUE(std::equal(lengths.begin(), lengths.end(), batch.cu_seqlens.begin()));
  }
}

void ExpectSplit(const nlohmann::json& expected, const Dataset* dataset) {
  ASSERT_EQ(dataset == nullptr, expected.is_null());
  if (dataset == nullptr) return;
  EXPECT_EQ(dataset->size(), expected["len"]);
  if (expected["class"] == "BlendedDataset") {
    const auto* blend = dynamic_cast<const BlendedDataset*>(dataset);
    ASSERT_NE(blend, nullptr);
    EXPECT_EQ(blend->weights(), expected["weights"].get<std::vector<double>>());
    ExpectArray<int16_t>(expected["dataset_index"], std::span(blend->index().dataset), "dataset_index");
    ExpectArray<int64_t>(expected["dataset_sample_index"], std::span(blend->index().dataset_sample), "dataset_sample_index");
    for (size_t i = 0; i < blend->parts().size(); ++i) ExpectPart(expected["datasets"][i], *blend->parts()[i]);
  } else {
    const auto* part = dynamic_cast<const GptDataset*>(dataset);
    ASSERT_NE(part, nullptr);
    ExpectPart(expected, *part);
  }
  // In order from a fresh object, as they were recorded.
  Sha256 tokens, labels, mask, positions;
  Batch batch(1, dataset->sequence_length(), true);
  const auto add = [](Sha256& hash, const std::vector<int32_t>& values) {
    const std::vector<int64_t> wide(values.begin(), values.end());
    hash.Add(std::span<const int64_t>(wide));
  };
  for (int64_t i = 0; i < dataset->size(); ++i) {
    dataset->Get(i, batch.Row(0));
    add(tokens, batch.tokens);
    add(labels, batch.labels);
    add(positions, batch.position_ids);
    mask.Add(std::span<const float>(batch.loss_mask));
    for (const auto& sample : expected["samples"]) {
      if (sample["idx"] != i) continue;
      SCOPED_TRACE(fmt::format("sample {}", i));
      ExpectSample(sample, batch);
    }
  }
  if (!expected.contains("all_samples")) return;
  const auto& all = expected["all_samples"];
  EXPECT_EQ(tokens.Hex(), all["tokens_sha256"]);
  EXPECT_EQ(labels.Hex(), all["labels_sha256"]);
  EXPECT_EQ(mask.Hex(), all["loss_mask_sha256"]);
  EXPECT_EQ(positions.Hex(), all["position_ids_sha256"]);
}

int64_t SizeOrEpoch(const nlohmann::json& size) { return size.is_null() ? kOneEpoch : size.get<int64_t>(); }

std::vector<std::string> Strings(const nlohmann::json& args, const char* key) {
  return args.contains(key) && !args[key].is_null() ? args[key].get<std::vector<std::string>>() : std::vector<std::string>();
}

// Prefixes stay relative ("a"), so the tests run in the recordings' folder.
GptDataConfig RecordedConfig(const nlohmann::json& args) {
  GptDataConfig config;
  config.data_path = Strings(args, "data_path");
  config.train_data_path = Strings(args, "train_data_path");
  config.valid_data_path = Strings(args, "valid_data_path");
  config.test_data_path = Strings(args, "test_data_path");
  config.split = args.value("split", std::string());
  config.sequence_length = args["sequence_length"];
  config.seed = args["random_seed"];
  config.vocab_size = 32000;
  config.eod_id = args.value("eod_id", 31999);
  config.pad_id = args.value("pad_id", -1);
  config.train_samples = SizeOrEpoch(args["sizes"][0]);
  config.valid_samples = SizeOrEpoch(args["sizes"][1]);
  config.test_samples = SizeOrEpoch(args["sizes"][2]);
  config.read_cache = config.write_cache = false;
  config.eod_mask_loss = args["eod_mask_loss"];
  config.reset_position_ids = args["reset_position_ids"];
  config.reset_attention_mask = args["reset_attention_mask"];
  config.inter_document_masking = args["inter_document_masking"];
  config.add_extra_token_to_sequence = args["add_extra_token_to_sequence"];
  config.drop_last_partial_validation_sequence = args["drop_last_partial_validation_sequence"];
  config.allow_ambiguous_pad_tokens = args["allow_ambiguous_pad_tokens"];
  config.mid_level_dataset_surplus = args["mid_level_dataset_surplus"];
  config.first_sample_loss_mask = true;
  config.allow_fewer_samples = true;
  return config;
}

class RecordedDataTest : public testing::Test {
 protected:
  RecordedDataTest() : before_(std::filesystem::current_path()) { std::filesystem::current_path(MlmPath("blend")); }
  ~RecordedDataTest() override { std::filesystem::current_path(before_); }

  static GptDataConfig Named(const std::string& name) {
    for (const auto& config : Oracle()["configs"]) {
      if (config["name"] == name) return RecordedConfig(config["args"]);
    }
    ADD_FAILURE() << "no recorded configuration " << name;
    return {};
  }

 private:
  std::filesystem::path before_;
};

TEST_F(RecordedDataTest, All47ConfigurationsEqualMegatron) {
  ASSERT_EQ(Oracle()["configs"].size(), 47u);
  for (const auto& recorded : Oracle()["configs"]) {
    SCOPED_TRACE(recorded["name"].get<std::string>());
    auto data = BuildGptDatasets(RecordedConfig(recorded["args"]));
    ASSERT_TRUE(data.ok()) << data.status();
    const std::pair<const char*, const Dataset*> splits[] = {
        {"train", data->train.get()}, {"valid", data->valid.get()}, {"test", data->test.get()}};
    for (const auto& [name, dataset] : splits) {
      SCOPED_TRACE(name);
      ExpectSplit(recorded[name], dataset);
    }
  }
}

TEST_F(RecordedDataTest, CacheFilesEqualMegatrons) {
  int checked = 0;
  for (const auto& recorded : Oracle()["configs"]) {
    if (!recorded.contains("cache_files")) continue;
    SCOPED_TRACE(recorded["name"].get<std::string>());
    TemporaryFolder folder;
    GptDataConfig config = RecordedConfig(recorded["args"]);
    config.cache_path = folder.path();
    config.read_cache = config.write_cache = true;
    ASSERT_TRUE(BuildGptDatasets(config).ok());
    for (const auto& [name, file] : recorded["cache_files"].items()) {
      const std::string content = ReadAll(folder / name);
      EXPECT_EQ(static_cast<int64_t>(content.size()), file["bytes"]) << name;
      if (file.contains("text")) {
        EXPECT_EQ(content, file["text"]) << name;
      }
      EXPECT_EQ(testing_data::Sha256Of(std::vector<char>(content.begin(), content.end())), file["sha256"]) << name;
      ++checked;
    }
    // From the cache: the same samples.
    auto again = BuildGptDatasets(config);
    ASSERT_TRUE(again.ok());
    ExpectSplit(recorded["train"], again->train.get());
  }
  EXPECT_GT(checked, 20);
}

std::string MessageOf(const GptDataConfig& config) {
  auto data = BuildGptDatasets(config);
  if (data.ok()) return "ok";
  EXPECT_FALSE(FieldViolationsOf(data.status()).empty() && !absl::IsNotFound(data.status())) << data.status();
  return std::string(data.status().message());
}

TEST_F(RecordedDataTest, RequestsThatMegatronRejectsOrNeverFinishes) {
  for (const auto& recorded : Oracle()["failures"]) {
    const std::string note = recorded["note"];
    SCOPED_TRACE(note);
    GptDataConfig config = RecordedConfig(recorded["args"]);
    const std::string message = MessageOf(config);
    if (note.find("zero test samples") != std::string::npos) {
      EXPECT_EQ(message, "ok");  // Nothing is asked of the empty split: it is left out instead.
      EXPECT_EQ(BuildGptDatasets(config)->test, nullptr);
    } else {
      EXPECT_NE(message, "ok");
    }
  }
}

TEST_F(RecordedDataTest, EmptySplitNamesSplitAndDocumentsNeeded) {
  GptDataConfig config = Named("single_a_e1_s64_seed1234");
  config.split = "9999,8,2";
  const std::string message = MessageOf(config);
  EXPECT_THAT(message, HasSubstr("dataset.split"));
  EXPECT_THAT(message, HasSubstr("valid split of a without documents"));
  EXPECT_THAT(message, HasSubstr("it has 60"));
  EXPECT_THAT(message, HasSubstr("at least 501 documents"));
}

TEST_F(RecordedDataTest, SettingsAreNamed) {
  const GptDataConfig good = Named("single_a_e1_s64_seed1234");
  const auto field_of = [](const GptDataConfig& config) {
    auto data = BuildGptDatasets(config);
    return data.ok() ? "" : FieldViolationsOf(data.status())[0].field;
  };
  GptDataConfig config = good;
  config.sequence_length = 0;
  EXPECT_EQ(field_of(config), "dataset.sequence_length");
  config = good;
  config.seed = int64_t{1} << 32;
  EXPECT_EQ(field_of(config), "dataset.random_seed");
  config = good;
  config.vocab_size = 0;
  EXPECT_EQ(field_of(config), "tokenizer.vocab_size");
  config = good;
  config.mock = true;
  EXPECT_EQ(field_of(config), "dataset.data_path");
  config = good;
  config.data_path.clear();
  EXPECT_EQ(field_of(config), "dataset.data_path");
  config = good;
  config.split = "0,1,1";
  EXPECT_EQ(field_of(config), "dataset.split");
  config = good;
  config.sequence_length = 100000;
  config.train_samples = kOneEpoch;
  EXPECT_EQ(field_of(config), "dataset.sequence_length");
}

TEST_F(RecordedDataTest, FewerSamplesThanAskedForIsAnError) {
  GptDataConfig config = Named("blend_nw_size");
  config.allow_fewer_samples = false;
  const std::string message = MessageOf(config);
  EXPECT_THAT(message, HasSubstr("hold 113 samples, but 1000 are asked for"));
}

TEST_F(RecordedDataTest, WeightsFarApart) {
  GptDataConfig config = Named("blend_w_ab_90_5_5");
  config.data_path = {"0.001", "a", "0.999", "b"};
  config.allow_fewer_samples = false;
  for (int64_t samples : {1, 7, 300, 999, 1000, 1001, 20000}) {
    config.train_samples = samples;
    auto data = BuildGptDatasets(config);
    if (!data.ok()) continue;  // Refused at the start is fine; running out later is not.
    ASSERT_GE(data->train->size(), samples);
    Batch batch(1, config.sequence_length);
    for (int64_t i = 0; i < data->train->size(); ++i) data->train->Get(i, batch.Row(0));
  }
}

TEST_F(RecordedDataTest, MissingFilesGetAHint) {
  GptDataConfig config = Named("single_a_e1_s64_seed1234");
  const auto message = [&](std::vector<std::string> path) {
    config.data_path = std::move(path);
    auto data = BuildGptDatasets(config);
    EXPECT_TRUE(absl::IsNotFound(data.status()));
    EXPECT_EQ(ReasonOf(data.status()), v1::REASON_DATA_NOT_FOUND);
    return std::string(data.status().message());
  };
  EXPECT_THAT(message({"nothing"}), HasSubstr("nothing.idx: no such file"));
  EXPECT_THAT(message({"a.bin"}), HasSubstr("without its extension: a"));
  EXPECT_THAT(message({"30", "a", "b", "c"}), HasSubstr("looks like a weight"));
}

TEST_F(RecordedDataTest, PreflightScansIds) {
  GptDataConfig config = Named("single_a_e1_s64_seed1234");
  std::vector<std::string> facts;
  EXPECT_TRUE(CheckGptData(config, &facts).ok());
  EXPECT_THAT(facts, testing::Contains(HasSubstr("a: 60 documents, 60 sequences, 12548 tokens of uint16")));
  EXPECT_THAT(facts, testing::Contains(HasSubstr("train: a: documents [0, 20), 4209 tokens an epoch, 1 epoch, 65 samples")));
  config.vocab_size = 31999;
  config.eod_id = 31998;
  const absl::Status status = CheckGptData(config, &facts);
  EXPECT_EQ(FieldViolationsOf(status)[0].field, "tokenizer.vocab_size");
  EXPECT_THAT(std::string(status.message()), HasSubstr("token id 31999 in sequence 0"));
  // Without the preflight the sample that holds the id stops the run, before the model sees it.
  auto data = BuildGptDatasets(config);
  ASSERT_TRUE(data.ok());
  Batch batch(1, config.sequence_length);
  const auto read_all = [&] {
    for (int64_t i = 0; i < data->train->size(); ++i) data->train->Get(i, batch.Row(0));
  };
  try {
    read_all();
    FAIL() << "an id outside the vocabulary was delivered";
  } catch (const EngineError& error) {
    EXPECT_EQ(error.reason(), v1::REASON_DATA_ERROR);
    EXPECT_THAT(error.what(), HasSubstr("token id 31999"));
  }
}

TEST_F(RecordedDataTest, PadsDoNotLeakIntoLaterMasksByDefault) {
  GptDataConfig config = Named("partial_first");
  config.first_sample_loss_mask = false;
  auto data = BuildGptDatasets(config);
  ASSERT_TRUE(data.ok());
  Batch batch(1, config.sequence_length);
  data->valid->Get(0, batch.Row(0));
  EXPECT_THAT(batch.loss_mask, testing::Contains(0.0f));
  data->valid->Get(1, batch.Row(0));
  EXPECT_THAT(batch.loss_mask, testing::Each(1.0f));
}

// --- Cache against changed data ---

void WriteCorpus(const std::string& prefix, int32_t first_token) {
  auto writer = IndexedWriter::Create(prefix, TokenType::kUint16, true);
  ASSERT_TRUE(writer.ok());
  for (int document = 0; document < 20; ++document) {
    std::vector<int32_t> tokens(static_cast<size_t>(10 + document * first_token % 7), first_token);
    ASSERT_TRUE((*writer)->AddSequence(tokens).ok());
    (*writer)->EndDocument();
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

TEST(IndexCacheTest, IsNotReusedAfterTheDataOrTheSettingsChanged) {
  TemporaryFolder folder;
  GptDataConfig config;
  config.data_path = {folder / "corpus"};
  config.split = "1,0,0";
  config.sequence_length = 8;
  config.vocab_size = 100;
  config.train_samples = 50;
  const auto sample_index = [&] {
    auto data = BuildGptDatasets(config);
    EXPECT_TRUE(data.ok()) << data.status();
    const auto values = dynamic_cast<const GptDataset&>(*data->train).index().sample.values;
    return std::vector<int32_t>(values.begin(), values.end());
  };
  WriteCorpus(config.data_path[0], 3);
  const auto before = sample_index();
  EXPECT_TRUE(std::filesystem::exists(folder / "corpus/cache/GPTDataset_indices"));
  EXPECT_EQ(sample_index(), before);
  WriteCorpus(config.data_path[0], 4);
  const auto after = sample_index();
  EXPECT_NE(after, before);
  config.read_cache = false;
  EXPECT_EQ(sample_index(), after);
  config.read_cache = true;
  config.add_extra_token_to_sequence = false;  // Not part of Megatron-LM's key.
  EXPECT_NE(sample_index(), after);
}

TEST(IndexCacheTest, DamagedOrUnwritableCachesAreRebuilt) {
  TemporaryFolder folder;
  GptDataConfig config;
  config.data_path = {folder / "corpus"};
  config.split = "1,0,0";
  config.sequence_length = 8;
  config.vocab_size = 100;
  config.train_samples = 50;
  config.cache_path = folder / "cache";
  WriteCorpus(config.data_path[0], 3);
  auto built = BuildGptDatasets(config);
  ASSERT_TRUE(built.ok());
  const std::string expected = HashOfTexts(*built->train, 50);
  for (const auto& entry : std::filesystem::directory_iterator(config.cache_path)) {
    const std::string path = entry.path().string(), content = ReadAll(path);
    for (const std::string& damaged : {content.substr(0, content.size() / 2), std::string(), content + "x"}) {
      testing_data::WriteAll(path, damaged);
      auto again = BuildGptDatasets(config);
      ASSERT_TRUE(again.ok());
      EXPECT_EQ(HashOfTexts(*again->train, 50), expected) << path;
    }
    std::string noise = content;
    for (size_t i = content.size() / 2; i < noise.size(); ++i) noise[i] = static_cast<char>(0xff);
    testing_data::WriteAll(path, noise);
    auto again = BuildGptDatasets(config);
    ASSERT_TRUE(again.ok()) << path;
    EXPECT_EQ(HashOfTexts(*again->train, 50), expected) << path;
    std::string flipped = ReadAll(path);
    flipped.back() ^= 1;  // In the shuffle index still a valid number.
    testing_data::WriteAll(path, flipped);
    auto last = BuildGptDatasets(config);
    ASSERT_TRUE(last.ok()) << path;
    EXPECT_EQ(HashOfTexts(*last->train, 50), expected) << path;
  }
  config.cache_path = "/proc/nowhere";
  auto unwritable = BuildGptDatasets(config);
  ASSERT_TRUE(unwritable.ok());
  EXPECT_EQ(HashOfTexts(*unwritable->train, 50), expected);
}

}  // namespace
}  // namespace mbridge
