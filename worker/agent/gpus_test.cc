// With a library in NVML's place: needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <sstream>

#include "worker/agent/inventory.h"

namespace mbridge::agent {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* kLibrary = MB_BINARY_DIR "/tests/libmb_fake_nvml.so";

class GpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("FAKE_NVML");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    before_ = spdlog::default_logger();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  void TearDown() override {
    spdlog::set_default_logger(before_);
    ::unsetenv("FAKE_NVML");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  }
  v1::NodeInventory Read(const char* library = kLibrary) {
    v1::NodeInventory inventory;
    ReadGpus(&inventory, library);
    return inventory;
  }

  std::ostringstream log_;
  std::shared_ptr<spdlog::logger> before_;
};

TEST_F(GpusTest, AreDescribedWithTheirCapabilityAndTheMemoryThatProgramsCanHave) {
  const v1::NodeInventory inventory = Read();
  ASSERT_EQ(inventory.gpus_size(), 2) << log_.str();
  EXPECT_EQ(inventory.gpus(0).uuid(), "GPU-0-0000");
  EXPECT_EQ(inventory.gpus(0).name(), "NVIDIA H200");
  EXPECT_EQ(inventory.gpus(0).compute_capability(), 90);
  EXPECT_EQ(inventory.gpus(1).compute_capability(), 121);
  EXPECT_EQ(inventory.gpus(1).index(), 1);
  EXPECT_EQ(inventory.gpus(0).memory_bytes(), int64_t{143155} << 20);  // What CUDA says of an H200.
  EXPECT_THAT(log_.str(), IsEmpty());
}

TEST_F(GpusTest, ADriverThatKeepsItsShareSecretGivesAll) {
  ::setenv("FAKE_NVML", "old", 1);
  EXPECT_EQ(Read().gpus(0).memory_bytes(), int64_t{143771} << 20);
}

TEST_F(GpusTest, WhereThereAreNoneTheLogSaysWhy) {
  EXPECT_EQ(Read("libmb_no_such_library.so.1").gpus_size(), 0);
  EXPECT_THAT(log_.str(), AllOf(HasSubstr("no GPUs are offered"), HasSubstr("libmb_no_such_library.so.1")));
  ::setenv("FAKE_NVML", "broken", 1);
  EXPECT_EQ(Read().gpus_size(), 0);
  EXPECT_THAT(log_.str(), HasSubstr("does not work (result 9)"));
}

TEST_F(GpusTest, HonoursTheVisibleOnes) {
  ::setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  ASSERT_EQ(Read().gpus_size(), 1);
  EXPECT_EQ(Read().gpus(0).index(), 1);
  ::setenv("CUDA_VISIBLE_DEVICES", "GPU-0", 1);
  ASSERT_EQ(Read().gpus_size(), 1);
  EXPECT_EQ(Read().gpus(0).index(), 0);
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EQ(Read().gpus_size(), 0);
  EXPECT_THAT(log_.str(), IsEmpty());
}

TEST_F(GpusTest, PartsOfGpusAreLeftOutWithAWarning) {
  ::setenv("CUDA_VISIBLE_DEVICES", "MIG-11c0b2f4,MIG-5d,1", 1);
  EXPECT_EQ(Read().gpus_size(), 1);
  const std::string log = log_.str();
  EXPECT_THAT(log, AllOf(HasSubstr("MIG-11c0b2f4"), HasSubstr("are not offered")));
  EXPECT_EQ(log.find("MIG-", log.find("MIG-") + 1), std::string::npos) << log;  // One line.
}

TEST_F(GpusTest, DividedGpusAreLeftOutWithAWarning) {
  ::setenv("FAKE_NVML", "mig", 1);
  const v1::NodeInventory inventory = Read();
  ASSERT_EQ(inventory.gpus_size(), 1);
  EXPECT_EQ(inventory.gpus(0).index(), 0);
  EXPECT_THAT(log_.str(), HasSubstr("nvidia-smi -i 1 -mig 0"));
}

TEST_F(GpusTest, ThoseWithoutKernelsAreLeftOutBesideOthers) {
  v1::NodeInventory inventory = Read();
  LeaveOutGpusWithoutKernels(&inventory, "90-real");
  ASSERT_EQ(inventory.gpus_size(), 1);
  EXPECT_EQ(inventory.gpus(0).compute_capability(), 90);
  EXPECT_THAT(log_.str(), AllOf(HasSubstr("left out"), HasSubstr("12.1")));
}

TEST_F(GpusTest, ThoseWithoutKernelsStayWhereTheyAreAlone) {
  v1::NodeInventory inventory = Read();
  for (const char* built : {"100-real", ""}) {
    LeaveOutGpusWithoutKernels(&inventory, built);
    EXPECT_EQ(inventory.gpus_size(), 2) << built;
  }
  EXPECT_THAT(log_.str(), IsEmpty());
}

}  // namespace
}  // namespace mbridge::agent
