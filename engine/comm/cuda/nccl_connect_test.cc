// A peer that never comes, on one GPU.
#include "engine/comm/nccl.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "engine/core/device.h"
#include "engine/core/watchdog.h"

namespace mbridge {
namespace {

constexpr int kTimedOut = 7;

[[noreturn]] void ConnectAlone() {
  std::string directory = testing::TempDir() + "nccl_XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) _exit(2);
  WatchdogOptions watch;
  watch.timeout_seconds = 2;
  watch.grace_seconds = 1;
  watch.size = 2;
  watch.end = [&directory](v1::Reason reason, const std::string& detail) {
    std::fprintf(stderr, "%s\n", detail.c_str());
    std::filesystem::remove_all(directory);
    _exit(reason == v1::REASON_COLLECTIVE_TIMEOUT ? kTimedOut : 1);
  };
  const Watchdog watchdog(watch);
  NcclOptions options;
  options.directory = directory;
  options.group = "world";
  options.size = 2;
  options.timeout_seconds = 2;
  options.context = DeviceOf(DeviceType::kCuda).MakeContext(size_t{1} << 20);
  MakeNcclCommunicator(options);
  _exit(0);
}

// The rank is inside NCCL, which waits without an end.
TEST(NcclConnect, TheWatchdogEndsARankWhosePeerNeverComes) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU on this machine";
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // Another process with a CUDA of its own.
  EXPECT_EXIT(ConnectAlone(), testing::ExitedWithCode(kTimedOut), "connecting in group world has not finished within 2 s");
}

}  // namespace
}  // namespace mbridge
