#include "engine/bridge/source_tensor.h"

#include <cmath>

#include "engine/bridge/conversion_test_support.h"
#include "engine/bridge/element_type.h"

namespace mbridge {
namespace {

class QuantisedTensors : public ConversionTest {
 protected:
  // A directory with these tensors.
  std::string Make(const std::vector<Stored>& all, const Json& config) {
    std::filesystem::create_directories(Path("source"));
    Write(Path("source") + "/config.json", config.dump());
    WriteAll(Path("source") + "/model.safetensors", all);
    return Path("source");
  }
};

template <class T> std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST_F(QuantisedTensors, BlocksOfEightBitFloatsAreScaled) {
  // 3 x 5 in blocks of 2 x 4: four scales.
  std::vector<uint8_t> values(15);
  for (int i = 0; i < 15; ++i) values[i] = static_cast<uint8_t>(0x30 + i);
  const std::vector<float> scales = {1.0f, 2.0f, 0.5f, 3.0f};
  const std::string source =
      Make({{{"a.weight", "F8_E4M3", {3, 5}, 15}, Bytes(values)}, {{"a.weight_scale_inv", "F32", {2, 2}, 16}, Bytes(scales)}},
           {{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {2, 4}}}}});
  const auto directory = ModelDirectory::Open(source, {});
  ASSERT_TRUE(directory.ok()) << directory.status();
  const auto tensor = SourceTensor::Open(*directory, "a.weight");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_TRUE((*tensor)->quantised());
  EXPECT_EQ((*tensor)->type(), DType::kBF16);
  std::vector<float> read(7);
  ASSERT_TRUE((*tensor)->Read(8, 7, DType::kF32, read.data()).ok());
  for (int i = 8; i < 15; ++i) {
    const int row = i / 5, column = i % 5;
    EXPECT_EQ(read[i - 8], FromE4M3(values[i]) * scales[row / 2 * 2 + column / 4]) << i;
  }
  EXPECT_EQ(QuantisedOwner("a.weight_scale_inv"), "a.weight");
}

TEST_F(QuantisedTensors, ScalesMustFitTheBlocks) {
  const std::string source = Make({{{"a.weight", "F8_E4M3", {3, 5}, 15}, std::string(15, '0')},
                                   {{"a.weight_scale_inv", "F32", {2, 2}, 16}, std::string(16, '\0')}},
                                  Json::object());
  const auto directory = ModelDirectory::Open(source, {});
  ASSERT_TRUE(directory.ok()) << directory.status();
  const auto tensor = SourceTensor::Open(*directory, "a.weight");
  ASSERT_FALSE(tensor.ok());
  EXPECT_NE(tensor.status().message().find("needs 1x1 scales"), std::string::npos) << tensor.status();
}

TEST_F(QuantisedTensors, FourBitBlocksBecomeTransposedMatrices) {
  // 2 experts, 3 rows of 2 groups: 64 inputs.
  std::vector<uint8_t> blocks(2 * 3 * 2 * 16), scales(2 * 3 * 2);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 37);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(120 + i);
  const std::string source =
      Make({{{"w_blocks", "U8", {2, 3, 2, 16}, 192}, Bytes(blocks)}, {{"w_scales", "U8", {2, 3, 2}, 12}, Bytes(scales)}},
           Json::object());
  const auto directory = ModelDirectory::Open(source, {});
  ASSERT_TRUE(directory.ok()) << directory.status();
  const auto tensor = SourceTensor::Open(*directory, "w");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  ASSERT_EQ((*tensor)->shape(), (std::vector<int64_t>{2, 64, 3}));
  std::vector<float> read(2 * 64 * 3);
  ASSERT_TRUE((*tensor)->Read(0, 2 * 64 * 3, DType::kF32, read.data()).ok());
  const float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int expert = 0; expert < 2; ++expert) {
    for (int input = 0; input < 64; ++input) {
      for (int row = 0; row < 3; ++row) {
        const uint8_t pair = blocks[((expert * 3 + row) * 2 + input / 32) * 16 + input % 32 / 2];
        const int bits = input % 2 == 0 ? pair & 15 : pair >> 4;
        const float value = (bits & 8 ? -kValues[bits & 7] : kValues[bits & 7]) *
                            std::ldexp(1.0f, scales[(expert * 3 + row) * 2 + input / 32] - 127);
        EXPECT_EQ(read[(expert * 64 + input) * 3 + row], value);
      }
    }
  }
  std::vector<float> part(5);
  ASSERT_TRUE((*tensor)->Read(64 * 3 - 2, 5, DType::kF32, part.data()).ok()) << "over the border of two experts";
  EXPECT_EQ(part, std::vector<float>(read.begin() + 64 * 3 - 2, read.begin() + 64 * 3 + 3));
}

TEST_F(QuantisedTensors, WholeModelOfEightBitBlocks) {
  const std::string source = Copy("llama_untied");
  auto all = ReadAll(source + "/model.safetensors");
  std::vector<Stored> quantised;
  for (Stored& stored : all) {
    if (!stored.tensor.name.ends_with("_proj.weight")) {
      quantised.push_back(stored);
      continue;
    }
    const int64_t rows = stored.tensor.shape[0], columns = stored.tensor.shape[1];
    std::string eight(static_cast<size_t>(rows * columns), '\0');
    ConvertToFormat(DType::kF32, stored.bytes.data(), "F8_E4M3", eight.data(), rows * columns);
    quantised.push_back({{stored.tensor.name, "F8_E4M3", {rows, columns}, rows * columns}, eight});
    const std::vector<float> scales(static_cast<size_t>((rows + 31) / 32 * ((columns + 31) / 32)), 0.5f);
    quantised.push_back({{stored.tensor.name + "_scale_inv",
                          "F32",
                          {(rows + 31) / 32, (columns + 31) / 32},
                          static_cast<int64_t>(scales.size() * 4)},
                         Bytes(scales)});
  }
  WriteAll(source + "/model.safetensors", quantised);
  SetKey(source, "quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {32, 32}}});
  const auto saved = RunImport(Import(source), {});
  ASSERT_TRUE(saved.ok()) << saved.status();
  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  const Json config = ReadJson(exported->path + "/config.json");
  EXPECT_FALSE(config.contains("quantization_config"));
  for (const Stored& stored : ReadAll(exported->path + "/model.safetensors")) {
    EXPECT_EQ(stored.tensor.dtype, stored.tensor.name.ends_with("_proj.weight") ? "BF16" : "F32") << stored.tensor.name;
  }
  SetKey(source, "quantization_config", {{"quant_method", "gptq"}});
  EXPECT_NE(Refusal(source).find("gptq"), std::string::npos);
}

}  // namespace
}  // namespace mbridge
