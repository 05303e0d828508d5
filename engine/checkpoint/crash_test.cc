// Saves that are killed, meet a full disk or a lost peer: older checkpoints stay, and no half one is ever accepted.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/checkpoint/checkpoint_test_support.h"
#include "engine/core/file.h"

namespace mbridge {
namespace {

using testing::ElementsAre;

// What a child process came to: its exit code, or minus its signal.
int RunChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const EngineError& error) {
      code = error.reason();
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

class CrashTest : public CheckpointTest {
 protected:
  CrashTest() {
    const auto result = SaveCheckpoint(Step(1), MetaOf(1), State(1).tensors(), self_.get());
    EXPECT_TRUE(result.ok()) << result.status();
    first_hash_ = result->manifest_hash;
  }

  // Saves step 2 in a child with the failpoints set; see RunChild. 0: saved.
  int SaveInChild(const std::string& failpoints) {
    return RunChild([&] {
      SetFailpoints(failpoints);
      State state(2);
      const auto result = SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), self_.get());
      return result.ok() ? 0 : static_cast<int>(ReasonOf(result.status()));
    });
  }

  // Step 1 is whole; step 2 is absent or whole; a new save of step 2 works and cleans up.
  void ExpectSound() {
    EXPECT_TRUE(VerifyCheckpoint(Step(1), first_hash_).ok());
    const auto second = VerifyCheckpoint(Step(2));
    if (!second.ok()) {
      EXPECT_EQ(second.status().code(), absl::StatusCode::kNotFound);
      EXPECT_FALSE(std::filesystem::exists(Step(2)));
      State state(2);
      ASSERT_TRUE(SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), self_.get()).ok());
      EXPECT_THAT(Entries(), ElementsAre("step_00000001", "step_00000002"));
    }
    State into(0), expected(2);
    ASSERT_TRUE(LoadCheckpoint(Step(2), {}, into.tensors(), self_.get()).ok());
    EXPECT_TRUE(into == expected);
    std::filesystem::remove_all(Step(2));
  }

  std::string first_hash_;
};

TEST_F(CrashTest, KilledAtEachStepOfASave) {
  for (const char* place :
       {"checkpoint.after_mkdir", "checkpoint.tensor", "checkpoint.before_shard_sync", "file.sync", "checkpoint.after_shards",
        "checkpoint.before_manifest", "checkpoint.before_rename", "checkpoint.after_rename"}) {
    EXPECT_EQ(SaveInChild(fmt::format("{}=kill", place)), -SIGKILL) << place;
    EXPECT_EQ(std::filesystem::exists(Step(2)), std::string(place) == "checkpoint.after_rename");
    ExpectSound();
  }
}

TEST_F(CrashTest, KilledAtEachWrite) {
  int kills = 0;
  for (int pass = 1;; ++pass) {
    const int result = SaveInChild(fmt::format("file.write=kill@{}", pass));
    if (result == 0) break;
    ASSERT_EQ(result, -SIGKILL);
    ++kills;
    ExpectSound();
  }
  EXPECT_EQ(kills, 6);  // Header, four tensors, manifest.
}

TEST_F(CrashTest, FullDiskAtEachWriteLeavesNothing) {
  for (const char* call : {"file.write", "file.sync"}) {
    for (int pass = 1; pass <= (std::string(call) == "file.write" ? 6 : 2); ++pass) {
      EXPECT_EQ(SaveInChild(fmt::format("{}=error:{}@{}", call, ENOSPC, pass)), v1::REASON_DISK_FULL) << call << pass;
      EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
    }
  }
  EXPECT_EQ(SaveInChild(fmt::format("file.write=error:{}@3", EIO)), v1::REASON_CHECKPOINT_IO_ERROR);
  EXPECT_EQ(SaveInChild(fmt::format("checkpoint.before_rename=error:{}", EIO)), v1::REASON_CHECKPOINT_IO_ERROR);
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
  ExpectSound();
}

TEST_F(CrashTest, ShortWritesOfTheKernelAreNoSuccess) {
  // A file size limit makes write() stop in the middle, as a full disk does.
  const int result = RunChild([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1500, 1500};
    setrlimit(RLIMIT_FSIZE, &limit);
    State state(2);
    return static_cast<int>(ReasonOf(SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), self_.get()).status()));
  });
  EXPECT_EQ(result, v1::REASON_DISK_FULL);
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
}

TEST_F(CrashTest, ASmallDiskIsRefusedBeforeWriting) {
  constexpr int kCannotMount = 77;
  const int result = RunChild([&] {
    // A file system of 1 MiB, seen by this child only.
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return kCannotMount;
    const std::string disk = directory_ + "/disk";
    mkdir(disk.c_str(), 0700);
    if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=1m") != 0) return kCannotMount;
    State state(2);
    const auto saved = SaveCheckpoint(disk + "/run/step_00000002", MetaOf(2), state.tensors(), self_.get());
    const bool empty = std::filesystem::is_empty(disk + "/run");
    return empty ? static_cast<int>(ReasonOf(saved.status())) : 98;
  });
  if (result == kCannotMount) GTEST_SKIP() << "no right to mount a file system";
  EXPECT_EQ(result, v1::REASON_DISK_FULL);
}

TEST_F(CrashTest, WhatDeadSavesLeftIsRemoved) {
  std::filesystem::create_directories(directory_ + "/run/.tmp-step_00000007/deep");
  std::ofstream(directory_ + "/run/.tmp-step_00000007/deep/file") << "x";
  EXPECT_TRUE(RemoveUnfinishedCheckpoints(directory_ + "/run").ok());
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
  EXPECT_TRUE(RemoveUnfinishedCheckpoints(directory_ + "/none").ok());
}

// Two rank processes; one dies in the middle of the save, the other must notice and nothing may look saved.
TEST_F(CrashTest, ARankKilledInASaveEndsTheOther) {
  for (const int victim : {0, 1}) {
    for (const char* place : {"checkpoint.after_mkdir", "checkpoint.before_shard_sync", "checkpoint.after_shards"}) {
      if (victim == 1 && std::string(place) == "checkpoint.after_mkdir") continue;  // Only rank 0 passes there.
      std::string pattern = testing::TempDir() + "ranks_XXXXXX";
      const std::string rendezvous = mkdtemp(pattern.data());
      pid_t children[2];
      for (int rank = 0; rank < 2; ++rank) {
        children[rank] = fork();
        if (children[rank] != 0) continue;
        if (rank == victim) SetFailpoints(fmt::format("{}=kill", place));
        int code = 0;
        try {
          const auto world = MakeGlooCommunicator({rendezvous, "world", rank, 2, 20});
          State state(2);
          for (size_t i = 0; i < 4; ++i) state[i].write_here = static_cast<int>(i % 2) == rank;
          code = SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), world.get()).ok() ? 0 : 99;
        } catch (const EngineError& error) {
          code = error.reason();
        }
        _exit(code);
      }
      int status[2];
      for (int rank = 0; rank < 2; ++rank) waitpid(children[rank], &status[rank], 0);
      EXPECT_TRUE(WIFSIGNALED(status[victim])) << place;
      EXPECT_EQ(WEXITSTATUS(status[1 - victim]), v1::REASON_PEER_LOST) << place << ", wait status " << status[1 - victim];
      std::filesystem::remove_all(rendezvous);
      ExpectSound();
    }
  }
}

TEST_F(CrashTest, AFullDiskOnOneRankIsEveryonesError) {
  SetFailpoints(fmt::format("file.write=error:{}@4", ENOSPC));
  OnRanks(2, [&](Communicator& world) {
    State state(2);
    for (size_t i = 0; i < 4; ++i) state[i].write_here = static_cast<int>(i % 2) == world.rank();
    EXPECT_EQ(ReasonOf(SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), &world).status()), v1::REASON_DISK_FULL);
  });
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
}

}  // namespace
}  // namespace mbridge
