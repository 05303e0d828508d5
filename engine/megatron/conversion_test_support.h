// Checkpoints of the real megatron-core for the tests.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include <fmt/format.h>

#include "engine/bridge/safetensors.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/core/scratch_test_support.h"
#include "engine/megatron/conversion.h"

namespace mbridge {

class MegatronTest : public ScratchTest {
 protected:
  static std::string Fixture(const std::string& name) { return fmt::format("{}/fixtures/megatron/{}", MB_BINARY_DIR, name); }
  // A copy of a fixture that a test may damage.
  std::string Copy(const std::string& fixture, const std::string& name = "source") const {
    std::filesystem::copy(Fixture(fixture), Path(name), std::filesystem::copy_options::recursive);
    return Path(name);
  }

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
};

}  // namespace mbridge
