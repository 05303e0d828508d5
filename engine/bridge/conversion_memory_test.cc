// Memory of conversions does not grow with the model. MB_FULL=1: 9 GB in under 1.5 GB, and the speed beside a plain copy.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "engine/bridge/conversion_test_support.h"

namespace mbridge {
namespace {

// Peak of the resident memory since the last reset, in bytes.
int64_t PeakMemory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}
bool ResetPeakMemory() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

class ConversionMemory : public ConversionTest {
 protected:
  // A BF16 Llama of which only the header is written; the data are a hole in the file, or random when `real`.
  int64_t MakeModel(int64_t layers, int64_t hidden, int64_t ffn, int64_t vocabulary, bool real) {
    std::filesystem::create_directories(Path("source"));
    const Json config = {{"model_type", "llama"},
                         {"architectures", {"LlamaForCausalLM"}},
                         {"vocab_size", vocabulary},
                         {"hidden_size", hidden},
                         {"num_hidden_layers", layers},
                         {"num_attention_heads", hidden / 128},
                         {"num_key_value_heads", hidden / 512},
                         {"intermediate_size", ffn},
                         {"max_position_embeddings", 8192},
                         {"rms_norm_eps", 1e-5},
                         {"rope_theta", 500000.0},
                         {"torch_dtype", "bfloat16"}};
    Write(Path("source/config.json"), config.dump(2));
    const auto architecture = ArchitectureOf(config);
    EXPECT_TRUE(architecture.ok()) << architecture.status();
    const auto model = ReadModelConfig(**architecture, config);
    EXPECT_TRUE(model.ok()) << model.status();
    const auto parameters = ModelParameters(*model);
    const auto mappings = MapModel(**architecture, *model, *parameters, vocabulary);
    EXPECT_TRUE(mappings.ok()) << mappings.status();
    std::vector<SafetensorsTensor> tensors;
    int64_t bytes = 0;
    for (const TensorMapping& mapping : *mappings) {
      for (const TheirTensor& tensor : mapping.theirs) {
        int64_t size = 2;
        for (const int64_t dim : tensor.shape) size *= dim;
        tensors.push_back({tensor.name, "BF16", tensor.shape, size});
        bytes += size;
      }
    }
    const std::string header = SafetensorsHeader(tensors, {});
    const std::string path = Path("source/model.safetensors");
    std::ofstream file(path, std::ios::binary);
    file << header;
    std::string block(1 << 20, '\0');
    uint64_t state = 1;
    for (int64_t done = 0; real && done < bytes; done += static_cast<int64_t>(block.size())) {
      for (size_t i = 0; i + 8 <= block.size(); i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint64_t value = state & 0x3fff3fff3fff3fffu;  // Finite.
        std::memcpy(block.data() + i, &value, 8);
      }
      file.write(block.data(), std::min<int64_t>(static_cast<int64_t>(block.size()), bytes - done));
    }
    file.close();
    std::filesystem::resize_file(path, header.size() + static_cast<size_t>(bytes));
    return bytes;
  }

  // Import, export and verification; the most memory that they took beyond what the process had.
  int64_t ConvertAndMeasure() {
    EXPECT_TRUE(ResetPeakMemory());
    const int64_t before = PeakMemory();
    const auto saved = RunImport(Import(Path("source")), {});
    EXPECT_TRUE(saved.ok()) << saved.status();
    const auto exported = RunExport(Export(), {});
    EXPECT_TRUE(exported.ok()) << exported.status();
    return PeakMemory() - before;
  }
};

TEST_F(ConversionMemory, AFewTensorsWhateverTheSize) {
  const int64_t bytes = MakeModel(8, 1024, 4096, 16384, false);
  EXPECT_GT(bytes, int64_t{280} << 20);
  const int64_t peak = ConvertAndMeasure();
  fmt::print("{} MiB converted in {} MiB\n", bytes >> 20, peak >> 20);
  EXPECT_LT(peak, int64_t{100} << 20) << "the largest tensor has 32 MiB";
}

TEST_F(ConversionMemory, EightGigabytesInUnderOneAndAHalf) {
  if (std::getenv("MB_FULL") == nullptr) GTEST_SKIP() << "takes 30 GB of disk and minutes; set MB_FULL=1";
  const int64_t bytes = MakeModel(16, 4096, 14336, 128256, true);
  EXPECT_GT(bytes, int64_t{8} << 30);
  const auto seconds = [](const auto& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const double copy = seconds([&] {
    const std::string command =
        fmt::format("cp '{}' '{}' && sync '{}'", Path("source/model.safetensors"), Path("copy"), Path("copy"));
    EXPECT_EQ(std::system(command.c_str()), 0);
  });
  std::filesystem::remove(Path("copy"));
  int64_t peak = 0;
  EXPECT_TRUE(ResetPeakMemory());
  const double import = seconds([&] { EXPECT_TRUE(RunImport(Import(Path("source")), {}).ok()); });
  peak = PeakMemory();
  EXPECT_LT(peak, int64_t{1536} << 20);
  const double convert = seconds([&] { EXPECT_TRUE(RunExport(Export(), {}).ok()); });
  EXPECT_LT(PeakMemory(), int64_t{1536} << 20);
  fmt::print("{:.1f} GB: copy {:.1f} s, import {:.1f} s ({:.2f} of the copy's speed), export {:.1f} s ({:.2f}), peak {} MiB\n",
             static_cast<double>(bytes) / 1e9, copy, import, copy / import, convert, copy / convert, peak >> 20);
}

}  // namespace
}  // namespace mbridge
