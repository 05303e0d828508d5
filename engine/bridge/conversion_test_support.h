// Directories of models for the conversion tests.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "engine/bridge/config_form.h"
#include "engine/bridge/conversion.h"
#include "engine/bridge/safetensors.h"
#include "engine/core/safetensors_writer.h"
#include "engine/core/scratch_test_support.h"

namespace mbridge {

class ConversionTest : public ScratchTest {
 protected:
  static std::string Fixture(const std::string& name) { return fmt::format("{}/fixtures/hf/{}", MB_BINARY_DIR, name); }
  // A copy of a fixture's model that a test may damage.
  std::string Copy(const std::string& fixture, const std::string& name = "source") const {
    std::filesystem::create_directories(Path(name));
    for (const char* file : {"config.json", "generation_config.json", "model.safetensors"}) {
      std::filesystem::copy_file(Fixture(fixture) + "/" + file, Path(name) + "/" + file);
    }
    return Path(name);
  }

  static Json ReadJson(const std::string& path) {
    const auto json = ParseConfigJson(Read(path), path);
    EXPECT_TRUE(json.ok()) << json.status();
    return json.ok() ? *json : Json();
  }
  static void SetKey(const std::string& directory, const std::string& key, const Json& value) {
    Json config = ReadJson(directory + "/config.json");
    config[key] = value;
    Write(directory + "/config.json", config.dump(2));
  }

  struct Stored {
    SafetensorsTensor tensor;
    std::string bytes;
  };
  static std::vector<Stored> ReadAll(const std::string& path) {
    std::vector<Stored> all;
    const auto file = SafetensorsFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return all;
    for (const SafetensorsEntry& entry : file->entries()) {
      Stored stored{{entry.name, entry.dtype, entry.shape, entry.bytes}, std::string(static_cast<size_t>(entry.bytes), '\0')};
      EXPECT_TRUE(file->Read(entry, stored.bytes.data()).ok());
      all.push_back(std::move(stored));
    }
    return all;
  }
  static void WriteAll(const std::string& path, const std::vector<Stored>& all) {
    std::filesystem::remove(path);
    std::vector<SafetensorsTensor> tensors;
    for (const Stored& stored : all) tensors.push_back(stored.tensor);
    auto writer = SafetensorsWriter::Create(path, tensors, {{"format", "pt"}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t i = 0; i < all.size(); ++i) ASSERT_TRUE(writer->Write(i, 0, all[i].bytes.data(), all[i].bytes.size()).ok());
    ASSERT_TRUE(writer->Finish().ok());
  }

  ImportOptions Import(const std::string& source) const {
    ImportOptions options;
    options.source = source;
    options.path = Path("checkpoint");
    return options;
  }
  ExportOptions Export() const {
    ExportOptions options;
    options.checkpoint = Path("checkpoint");
    options.path = Path("exported");
    return options;
  }
  // The message of a refused import.
  std::string Refusal(const std::string& source, const AllowedRoots& roots = {}) const {
    ImportOptions options = Import(source);
    options.roots = roots;
    const auto plan = PlanImport(options);
    EXPECT_FALSE(plan.ok());
    return std::string(plan.status().message());
  }
};

}  // namespace mbridge
