// Readers of foreign files under damage: they end with a value or an error, never in a crash.
#include <random>

#include "engine/bridge/conversion_test_support.h"
#include "tests/fuzz/mutate.h"

namespace mbridge {
namespace {

// In CI; a hundred times as many with MB_FULL=1.
int Rounds() { return fuzz::Rounds(300); }

// Flips, cuts, repeats and overwrites a few bytes.
std::string Damage(std::string text, size_t most, std::mt19937* random) {
  const auto below = [&](size_t bound) { return bound == 0 ? size_t{0} : static_cast<size_t>((*random)() % bound); };
  static const std::string kBits[] = {
      "{",    "}",    "[",        "]",       "\"",  ":", ",", "0", "-1", "1e400", "18446744073709551615",
      "null", "true", "Infinity", "\\u0000", "\xff"};
  for (size_t change = 0; change <= below(4); ++change) {
    const size_t at = below(std::min(most, text.size()));
    switch (below(4)) {
      case 0: text[at] = static_cast<char>((*random)()); break;
      case 1: text.erase(at, below(16) + 1); break;
      case 2: text.insert(at, text.substr(at, below(64))); break;
      default: text.insert(at, kBits[below(std::size(kBits))]); break;
    }
    if (text.empty()) text = " ";
  }
  return text;
}

class ReaderFuzz : public ConversionTest {};

TEST_F(ReaderFuzz, Safetensors) {
  const std::string whole = Read(Fixture("llama_untied") + "/model.safetensors");
  std::mt19937 random(7);
  int opened = 0;
  for (int round = 0; round < Rounds(); ++round) {
    Write(Path("damaged"), Damage(whole, 3000, &random));
    const auto file = SafetensorsFile::Open(Path("damaged"));
    if (!file.ok()) continue;
    ++opened;
    for (const SafetensorsEntry& entry : file->entries()) {
      std::string bytes(static_cast<size_t>(entry.bytes), '\0');
      EXPECT_TRUE(file->Read(entry, bytes.data()).ok()) << "what the header promises is there";
    }
  }
  fmt::print("{} of {} damaged files were still files\n", opened, Rounds());
}

TEST_F(ReaderFuzz, Configs) {
  std::mt19937 random(8);
  int read = 0;
  for (const char* entry : {"llama_tied_rope3", "qwen2", "qwen3_moe", "deepseek_v3", "gemma3", "mamba2"}) {
    const std::string whole = Read(Fixture(entry) + "/config.json");
    for (int round = 0; round < Rounds(); ++round) {
      const auto json = ParseConfigJson(Damage(whole, whole.size(), &random), "config.json");
      if (!json.ok()) continue;
      const auto architecture = ArchitectureOf(*json);
      if (!architecture.ok()) continue;
      const auto model = ReadModelConfig(**architecture, *json);
      if (!model.ok() || model->num_layers > 100) continue;
      ++read;
      const auto parameters = ModelParameters(*model);
      if (!parameters.ok()) continue;
      MapModel(**architecture, *model, *parameters, model->padded_vocab_size).status().IgnoreError();
      WriteModelConfig(**architecture, *model, model->padded_vocab_size, *json).status().IgnoreError();
    }
  }
  EXPECT_GT(read, 0);
}

TEST_F(ReaderFuzz, DirectoriesWithDamagedIndex) {
  const std::string source = Copy("llama_untied");
  const std::string whole = R"({"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model.safetensors"}})";
  std::mt19937 random(9);
  for (int round = 0; round < Rounds(); ++round) {
    Write(source + "/model.safetensors.index.json", Damage(whole, whole.size(), &random));
    ModelDirectory::Open(source, {}).status().IgnoreError();
  }
}

}  // namespace
}  // namespace mbridge
