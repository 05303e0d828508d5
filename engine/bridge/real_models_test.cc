// config.json of published models as the hub has them (tests/data/hub_configs.json): every key is known, the number of parameters
// is the published one, and an export keeps the form. The counts are those of transformers (tests/hf compares them).
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "engine/bridge/architecture.h"
#include "engine/bridge/config_form.h"

namespace mbridge {
namespace {

const Json& HubModels() {
  static const Json kModels = [] {
    const std::string path = MB_SOURCE_DIR "/tests/data/hub_configs.json";
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    const auto parsed = ParseConfigJson(text.str(), path);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.value_or(Json::object());
  }();
  return kModels;
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, model] : HubModels().items()) names.push_back(name);
  return names;
}

class RealModels : public testing::TestWithParam<std::string> {};

TEST_P(RealModels, ConfigAndParameters) {
  const Json& config = HubModels().at(GetParam()).at("config");
  const auto architecture = ArchitectureOf(config);
  ASSERT_TRUE(architecture.ok()) << architecture.status();
  const auto model = ReadModelConfig(**architecture, config);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto parameters = ModelParameters(*model);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  int64_t count = 0;
  for (const ParameterSpec& parameter : *parameters) {
    // A router's correction bias is no parameter to transformers.
    if (!parameter.name.ends_with(".expert_bias")) count += parameter.global_shape.NumElements();
  }
  EXPECT_EQ(count, HubModels().at(GetParam()).at("parameters").get<int64_t>());
  const auto mappings = MapModel(**architecture, *model, *parameters, model->padded_vocab_size);
  EXPECT_TRUE(mappings.ok()) << mappings.status();

  // The same model is written as it was; another one with the same keys.
  const auto same = WriteModelConfig(**architecture, *model, model->padded_vocab_size, config);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(*same, config);
  GptConfig other = *model;
  other.layernorm_epsilon = 0.25;
  const auto changed = WriteModelConfig(**architecture, other, model->padded_vocab_size, config);
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_FALSE(changed->contains("rope_parameters"));
  EXPECT_EQ(changed->contains("torch_dtype"), config.contains("torch_dtype"));
  const auto again = ReadModelConfig(**architecture, *changed);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(ModelShape(*again) == ModelShape(other)) << changed->dump(1);
}

INSTANTIATE_TEST_SUITE_P(Hub, RealModels, testing::ValuesIn(Names()), [](const auto& info) {
  std::string name = info.param.substr(info.param.find('/') + 1);
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST(RealModelsTest, PublishedCounts) {
  const auto count = [](const char* name) { return HubModels().at(name).at("parameters").get<int64_t>(); };
  EXPECT_EQ(count("meta-llama/Llama-3.2-1B"), 1'235'814'400);
  EXPECT_EQ(count("meta-llama/Meta-Llama-3-8B"), 8'030'261'248);
  EXPECT_EQ(count("Qwen/Qwen3-8B"), 8'190'735'360);
  EXPECT_EQ(count("deepseek-ai/DeepSeek-V2-Lite"), 15'706'484'224);
}

}  // namespace
}  // namespace mbridge
