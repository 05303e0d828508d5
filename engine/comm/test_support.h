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

// The body on `size` threads, each a rank with its own communicator, which lives until all have finished: a rank that is done at
// once must not close the connections of one that is still connecting.
inline void OnRanks(int size, const std::function<void(Communicator&)>& body) {
  std::string pattern = testing::TempDir() + "ranks_XXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  std::vector<std::unique_ptr<Communicator>> worlds(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        worlds[rank] = MakeGlooCommunicator({directory, "world", rank, size, 30});
        body(*worlds[rank]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(directory);
}

}  // namespace mbridge
