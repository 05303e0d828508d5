// Every family against Hugging Face transformers: logits, loss and every gradient of tiny fp32 models, and the exact way there
// and back. The models are those of tests/data/hf_fixtures.tar.xz (build/fixtures/hf), and those in the folders of the directory
// MB_HF_MODELS, which tests/hf makes where transformers is installed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "engine/bridge/architecture.h"
#include "engine/bridge/config_form.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/family_table_test_support.h"
#include "engine/bridge/safetensors.h"
#include "engine/checkpoint/layout.h"
#include "engine/core/device.h"
#include "engine/model/gpt_model.h"

namespace mbridge {
namespace {

using Values = std::vector<float>;

template <class T> std::vector<T> ReadAs(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  std::vector<T> values(static_cast<size_t>(entry.NumElements()));
  EXPECT_EQ(static_cast<size_t>(entry.bytes), values.size() * sizeof(T)) << entry.name;
  EXPECT_TRUE(file.Read(entry, values.data()).ok()) << entry.name;
  return values;
}

template <class T> std::vector<T> ReadAs(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry* entry = file.Find(name);
  if (entry != nullptr) return ReadAs<T>(file, *entry);
  ADD_FAILURE() << file.path() << " has no " << name;
  return {};
}

// Largest difference as a share of the largest magnitude of `theirs`.
double RelativeDifference(const float* ours, const Values& theirs) {
  double largest = 0, difference = 0;
  for (size_t i = 0; i < theirs.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(theirs[i]));
    difference = std::max<double>(difference, std::fabs(ours[i] - theirs[i]));
  }
  return largest > 0 ? difference / largest : difference;
}

// Gradients of our parameter from theirs.
Values ImportGradient(const TensorMapping& mapping, const SafetensorsFile& file) {
  std::vector<Values> theirs;
  std::vector<const void*> pointers;
  for (const TheirTensor& tensor : mapping.theirs) {
    const SafetensorsEntry* entry = file.Find("grad." + tensor.name);
    if (entry == nullptr) {
      ADD_FAILURE() << mapping.ours << " wants grad." << tensor.name;
      return Values(static_cast<size_t>(mapping.shape.NumElements()));
    }
    EXPECT_EQ(entry->shape, tensor.shape) << tensor.name;
    theirs.push_back(ReadAs<float>(file, *entry));
  }
  for (const Values& values : theirs) pointers.push_back(values.data());
  Values ours(static_cast<size_t>(mapping.shape.NumElements()));
  ImportTensor(mapping, pointers, ours.data(), sizeof(float));
  return ours;
}

// The axis that tensor parallelism splits.
int ShardAxis(const std::string& name) {
  const bool of_mixer = name.find(".mixer.") != std::string::npos;
  if ((name.find("norm") != std::string::npos && !of_mixer) || name.find("router") != std::string::npos) return -1;
  const bool row_parallel = name.find("linear_proj") != std::string::npos || name.find("linear_fc2") != std::string::npos ||
                            name.find(".out_proj") != std::string::npos;
  if (row_parallel) return name.ends_with(".bias") ? -1 : 1;
  return 0;
}

// What two tensor-parallel ranks would hold, put together again.
Values ThroughTwoShards(const std::string& name, const Shape& shape, const Values& whole) {
  const int axis = ShardAxis(name);
  if (axis < 0 || axis >= shape.rank() || shape[axis] % 2 != 0) return whole;
  Values again(whole.size(), NAN);
  const Part all{shape, shape, -1, 0, 0, shape.NumElements()};
  for (const int64_t rank : {0, 1}) {
    Shape half = shape;
    half[axis] /= 2;
    const Part part{shape, half, axis, rank * half[axis], 0, half.NumElements()};
    Values shard(static_cast<size_t>(half.NumElements()));
    CopyOverlap(all, whole.data(), part, shard.data(), sizeof(float));
    CopyOverlap(part, shard.data(), all, again.data(), sizeof(float));
  }
  return again;
}

// The program that is linked with the CUDA code tests the GPU.
DeviceType DeviceUnderTest() { return HasDevice(DeviceType::kCuda) ? DeviceType::kCuda : DeviceType::kCpu; }

std::string FixtureFolder() {
  const char* folder = std::getenv("MB_HF_FIXTURES");
  return folder != nullptr ? folder : MB_BINARY_DIR "/fixtures/hf";
}

Values ToHost(const Context& context, const Tensor& tensor) {
  Values values(static_cast<size_t>(tensor.size()));
  DeviceOf(context.device).CopyToHost(context, values.data(), tensor.data, tensor.bytes());
  DeviceOf(context.device).Synchronize(context);
  return values;
}

std::string NameOfFolder(const std::string& folder) { return std::filesystem::path(folder).filename(); }

class HuggingFaceFixtures : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string folder = GetParam().front() == '/' ? GetParam() : fmt::format("{}/{}", FixtureFolder(), GetParam());
    if (DeviceUnderTest() == DeviceType::kCuda && !std::filesystem::exists(folder)) {
      GTEST_SKIP() << "no " << folder << ": MB_HF_FIXTURES names the folder of the unpacked fixtures";
    }
    auto directory = ModelDirectory::Open(folder, {});
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_ = std::make_unique<ModelDirectory>(std::move(directory).value());
    auto model = OpenModel(*directory_, 1);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    json_ = directory_->config();
    architecture_ = model_.architecture;
    config_ = model_.config;
    auto reference = SafetensorsFile::Open(folder + "/reference.safetensors");
    ASSERT_TRUE(reference.ok()) << reference.status();
    reference_ = std::make_unique<SafetensorsFile>(std::move(reference).value());
  }

  // Our parameter from the files, quantised or not.
  Values Weights(const TensorMapping& mapping) const {
    Values ours(static_cast<size_t>(mapping.shape.NumElements()), NAN);
    const absl::Status status = ReadMapped(*directory_, mapping, DType::kF32, ours.data());
    EXPECT_TRUE(status.ok()) << status;
    return ours;
  }

  // A tensor of theirs as a reader sees it.
  Values Theirs(const std::string& name) const {
    const auto source = SourceTensor::Open(*directory_, name);
    EXPECT_TRUE(source.ok()) << source.status();
    if (!source.ok()) return {};
    int64_t elements = 1;
    for (const int64_t size : (*source)->shape()) elements *= size;
    Values values(static_cast<size_t>(elements));
    EXPECT_TRUE((*source)->Read(0, static_cast<int64_t>(values.size()), DType::kF32, values.data()).ok()) << name;
    return values;
  }

  // Gradients have the names of the running model.
  std::vector<TensorMapping> MapGradients() const {
    const auto parameters = ModelParameters(config_);
    EXPECT_TRUE(parameters.ok()) << parameters.status();
    auto mappings = MapModel(*architecture_, config_, *parameters, config_.padded_vocab_size, true);
    EXPECT_TRUE(mappings.ok()) << mappings.status();
    return mappings.ok() ? *mappings : std::vector<TensorMapping>();
  }

  Json json_;
  const Architecture* architecture_ = nullptr;
  GptConfig config_;
  ImportedModel model_;
  std::unique_ptr<ModelDirectory> directory_;
  std::unique_ptr<SafetensorsFile> reference_;
};

TEST_P(HuggingFaceFixtures, ConfigBothWays) {
  const auto same = WriteModelConfig(*architecture_, config_, config_.padded_vocab_size, json_);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(*same, json_) << "what means the same stays as it is";

  const auto fresh = WriteModelConfig(*architecture_, config_, config_.padded_vocab_size, Json());
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  const auto read = ReadModelConfig(*architecture_, *fresh);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(ModelShape(*read) == ModelShape(config_)) << fresh->dump(1);

  // The form of older files says the same and is kept.
  const Json old = InFormOf({{"torch_dtype", "float32"}, {"rope_theta", 1}}, json_);
  EXPECT_FALSE(old.contains("rope_parameters"));
  const auto from_old = ReadModelConfig(*architecture_, old);
  ASSERT_TRUE(from_old.ok()) << from_old.status();
  EXPECT_TRUE(ModelShape(*from_old) == ModelShape(config_)) << old.dump(1);
  GptConfig other = config_;
  other.num_layers += 1;
  const auto changed = WriteModelConfig(*architecture_, other, config_.padded_vocab_size, old);
  if (changed.ok()) {
    EXPECT_FALSE(changed->contains("rope_parameters"));
    EXPECT_EQ(changed->contains("torch_dtype"), old.contains("torch_dtype"));
  }

  Json unknown = json_;
  unknown["no_such_option"] = 1;
  const auto refused = ReadModelConfig(*architecture_, unknown);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no_such_option"), std::string::npos) << refused.status();
  SawOfFamily(GetParam(), "config.json both ways", !HasFailure());
}

TEST_P(HuggingFaceFixtures, ThereAndBackExactly) {
  for (const bool two_shards : {false, true}) {
    std::map<std::string, Values> theirs;
    for (const TensorMapping& mapping : model_.mappings) {
      Values ours = Weights(mapping);
      if (two_shards) ours = ThroughTwoShards(mapping.ours, mapping.shape, ours);
      std::vector<void*> pointers;
      for (const TheirTensor& tensor : mapping.theirs) {
        Values& values = theirs[tensor.name];
        if (values.empty()) values = Values(Theirs(tensor.name).size(), NAN);
        pointers.push_back(values.data());
      }
      ExportTensor(mapping, ours.data(), pointers, sizeof(float));
    }
    for (const auto& [name, values] : theirs) EXPECT_EQ(Theirs(name), values) << name << ", shards " << 1 + two_shards;
    for (const SafetensorsFile& file : directory_->files()) {
      for (const SafetensorsEntry& entry : file.entries()) {
        EXPECT_TRUE(theirs.contains(entry.name) || theirs.contains(QuantisedOwner(entry.name)) ||
                    ClassifyExtra(*architecture_, entry.name) == ExtraTensor::kUnused)
            << entry.name << " is left out";
      }
    }
    SawOfFamily(GetParam(), two_shards ? "two shards" : "there and back", !HasFailure());
  }
}

TEST_P(HuggingFaceFixtures, LogitsLossAndGradients) {
  const auto ids = ReadAs<int64_t>(*reference_, "input_ids");
  const int64_t rows = reference_->Find("input_ids")->shape[0], length = reference_->Find("input_ids")->shape[1];
  GptConfig config = config_;
  config.seq_length = length;
  config.attention_dropout = 0.0;  // As in the reference.

  Device& device = DeviceOf(DeviceUnderTest());
  Context context;
  try {
    context = device.MakeContext(size_t{128} << 20);
    if (context.device == DeviceType::kCuda) RequireCudaParts(config);
  } catch (const EngineError& error) {
    GTEST_SKIP() << "SKIPPED: " << error.what();
  }
  GptModel model(config, nullptr, context);
  ParameterStore store(config.dtype, context.device);
  model.DeclareParameters(&store);
  store.Allocate();
  const std::vector<TensorMapping>&mappings = model_.mappings, runtime = MapGradients();
  ASSERT_EQ(mappings.size(), store.parameters().size());
  for (size_t i = 0; i < mappings.size(); ++i) {
    const Values values = Weights(mappings[i]);
    ASSERT_EQ(static_cast<int64_t>(values.size()), store[static_cast<int>(i)].value.size()) << mappings[i].ours;
    const Tensor& value = store[static_cast<int>(i)].value;
    device.CopyToDevice(context, value.data, values.data(), value.bytes());
    device.Synchronize(context);
  }
  model.Prepare(store, static_cast<int>(rows));

  std::vector<int32_t> tokens(ids.begin(), ids.end()), labels(ids.size(), 0), positions(ids.size());
  Values mask(ids.size(), 1.0f);
  for (int64_t i = 0; i < rows * length; ++i) {
    const bool last = i % length == length - 1;
    positions[i] = static_cast<int32_t>(i % length);
    labels[i] = last ? 0 : tokens[i + 1];
    if (last) mask[i] = 0.0f;
  }

  const Shape shape{length, rows, config.padded_vocab_size};
  const auto memory = AllocateZeroed(context.device, static_cast<size_t>(shape.NumElements()) * sizeof(float), "logits");
  const Tensor on_device{memory.get(), DType::kF32, context.device, shape};
  model.Logits(tokens.data(), positions.data(), on_device);
  const Values sequence_first = ToHost(context, on_device);
  Values logits;
  for (int64_t i = 0; i < rows * length; ++i) {
    const auto from = sequence_first.begin() + (i % length * rows + i / length) * config.padded_vocab_size;
    logits.insert(logits.end(), from, from + config.padded_vocab_size);
  }
  const double logits_difference = RelativeDifference(logits.data(), ReadAs<float>(*reference_, "logits"));
  EXPECT_LE(logits_difference, 1e-4);
  SawOfFamily(GetParam(), "logits", logits_difference <= 1e-4);

  RngStreams streams(1);
  const GptModel::LossSum sum =
      model.ForwardBackward(tokens.data(), labels.data(), mask.data(), positions.data(), 1.0f, &streams);
  const double loss_difference = std::fabs(sum.loss_sum / sum.tokens - ReadAs<float>(*reference_, "loss").at(0));
  EXPECT_LE(loss_difference, 1e-5);
  SawOfFamily(GetParam(), "loss", loss_difference <= 1e-5);

  double worst = 0;
  for (size_t i = 0; i < runtime.size(); ++i) {
    const Parameter& parameter = store[static_cast<int>(i)];
    // A router's correction bias is no parameter to transformers.
    if (parameter.spec.name.ends_with(".expert_bias")) continue;
    const double difference =
        RelativeDifference(ToHost(context, parameter.main_grad).data(), ImportGradient(runtime[i], *reference_));
    EXPECT_LE(difference, 1e-4) << parameter.spec.name;
    worst = std::max(worst, difference);
  }
  SawOfFamily(GetParam(), "gradients", worst <= 1e-4);
  fmt::print("{}: loss {:.1e}, logits {:.1e}, worst gradient {:.1e}\n", NameOfFolder(GetParam()), loss_difference,
             logits_difference, worst);
}

INSTANTIATE_TEST_SUITE_P(Families, HuggingFaceFixtures, testing::ValuesIn(FamilyFixtures()),
                         [](const auto& info) { return info.param; });

// Rotations, biases and forms of weights that the fixtures of the families do not have.
INSTANTIATE_TEST_SUITE_P(Options, HuggingFaceFixtures,
                         testing::Values("llama_linear", "llama_dynamic", "llama_yarn", "llama_attention_bias", "llama_bf16",
                                         "phi3_long", "phi3_partial", "gemma3_scaled", "deepseek_v2_yarn_mscale",
                                         "deepseek_v3_yarn_mscale", "deepseek_v3_fp8", "gpt_oss_mxfp4", "gpt2_old_files"),
                         [](const auto& info) { return info.param; });

std::vector<std::string> FreshModels() {
  std::vector<std::string> folders;
  std::error_code error;
  const char* parent = std::getenv("MB_HF_MODELS");
  for (std::filesystem::directory_iterator it(parent == nullptr ? "" : parent, error), end; !error && it != end; ++it) {
    folders.push_back(std::filesystem::absolute(it->path()));
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

INSTANTIATE_TEST_SUITE_P(Fresh, HuggingFaceFixtures, testing::ValuesIn(FreshModels()),
                         [](const auto& info) { return NameOfFolder(info.param); });

}  // namespace
}  // namespace mbridge
