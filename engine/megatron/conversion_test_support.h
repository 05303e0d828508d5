// Checkpoints of the real megatron-core for the tests.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/bridge/safetensors.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/megatron/conversion.h"

namespace mbridge {

class MegatronTest : public testing::Test {
 protected:
  MegatronTest() {
    std::string pattern = testing::TempDir() + "megatron_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~MegatronTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  static std::string Fixture(const std::string& name) { return fmt::format("{}/fixtures/megatron/{}", MB_BINARY_DIR, name); }
  // A copy of a fixture that a test may damage.
  std::string Copy(const std::string& fixture, const std::string& name = "source") const {
    std::filesystem::copy(Fixture(fixture), Path(name), std::filesystem::copy_options::recursive);
    return Path(name);
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  static void Write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

  MegatronImportOptions Import(const std::string& source, const std::string& to = "checkpoint") const {
    MegatronImportOptions options;
    options.source = source;
    options.path = Path(to);
    return options;
  }
  static std::string Refusal(const MegatronImportOptions& options) {
    const auto plan = PlanMegatronImport(options);
    EXPECT_FALSE(plan.ok());
    return std::string(plan.status().message());
  }

  using Tensors = std::map<std::string, std::string>;  // Name to shape, type and bytes.
  static Tensors TensorsOf(const std::string& checkpoint) {
    Tensors tensors;
    const auto read = ReadManifest(checkpoint, "");
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return tensors;
    ShardReader reader(checkpoint, read->manifest);
    for (const ManifestTensor& tensor : read->manifest.tensors) {
      std::string bytes(static_cast<size_t>(tensor.shape.NumElements()) * SizeOf(tensor.dtype), '\0');
      const Part whole{tensor.shape, tensor.shape, -1, 0, 0, tensor.shape.NumElements()};
      EXPECT_TRUE(ReadPart(reader, tensor, whole, tensor.dtype, bytes.data()).ok());
      tensors[tensor.name] = fmt::format("{}{}", tensor.shape.ToString(), NameOf(tensor.dtype)) + bytes;
    }
    return tensors;
  }

  std::string directory_;
};

}  // namespace mbridge
