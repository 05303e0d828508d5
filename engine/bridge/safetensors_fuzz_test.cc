// Damaged safetensors files: refused, or every tensor lies in the file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "engine/bridge/safetensors.h"
#include "tests/fuzz/mutate.h"

namespace mbridge {
namespace {

TEST(SafetensorsFuzz, ADamagedFileIsRefusedOrStaysInsideItself) {
  const std::string path = testing::TempDir() + "/safetensors_fuzz_" + std::to_string(getpid()) + ".safetensors";
  const std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                             R"("b":{"dtype":"F32","shape":[],"data_offsets":[12,16]},)"
                             R"("c":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}})";
  std::string whole(8, '\0');
  whole[0] = static_cast<char>(header.size());
  whole += header + std::string(16, 'x');
  fuzz::Mutator mutate(6);
  const int rounds = fuzz::Rounds(600);
  int refused = 0;
  for (int i = 0; i < rounds; ++i) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << mutate(whole);
    const auto file = SafetensorsFile::Open(path);
    if (!file.ok()) {
      ASSERT_TRUE(absl::IsDataLoss(file.status())) << file.status();
      ++refused;
      continue;
    }
    for (const SafetensorsEntry& entry : file->entries()) {
      ASSERT_GE(entry.bytes, 0);
      ASSERT_LE(entry.bytes, 16);
      std::string bytes(static_cast<size_t>(entry.bytes), '\0');
      ASSERT_TRUE(file->Read(entry, bytes.data()).ok());
    }
  }
  EXPECT_GT(refused, rounds / 4);
  EXPECT_LT(refused, rounds) << "no changed file was taken: nothing behind the checks was tried";
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace mbridge
