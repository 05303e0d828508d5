// Ranks as threads, for tests.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "engine/comm/communicator.h"

namespace mbridge {

// The body on `size` threads, each a rank with its own communicator.
inline void OnRanks(int size, const std::function<void(Communicator&)>& body) {
  std::string pattern = testing::TempDir() + "ranks_XXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto world = MakeGlooCommunicator({directory, "world", rank, size, 30});
        body(*world);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(directory);
}

}  // namespace mbridge
