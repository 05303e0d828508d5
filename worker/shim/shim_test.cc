// Runs the real mbshim with shell scripts as ranks.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mbridge/v1/rank.pb.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/file.h"
#include "worker/spool/process_identity.h"

extern char** environ;

namespace mbridge::shim {
namespace {

constexpr int kRank = 3;

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    ::usleep(10'000);
  }
  return false;
}

class ShimTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "shim_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    files_ = std::make_unique<spool::AttemptDirectory>(directory_);
    v1::RankSpec spec;
    spec.set_rank(kRank);
    spec.set_threads(7);
    spec.set_gpu_uuid("GPU-1");
    ASSERT_TRUE(spool::WriteProto(files_->SpecPath(kRank), spec).ok());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  void WriteScript(const std::string& body) {
    program_ = directory_ + "/rank.sh";
    std::ofstream(program_) << "#!/bin/sh\n" << body << "\n";
    ::chmod(program_.c_str(), 0700);
  }

  pid_t StartShim() {
    const std::string shim = MB_BINARY_DIR "/bin/mbshim";
    const std::string spec = files_->SpecPath(kRank);
    const char* arguments[] = {shim.c_str(), "--spec", spec.c_str(), "--program", program_.c_str(), nullptr};
    pid_t pid = 0;
    EXPECT_EQ(::posix_spawn(&pid, shim.c_str(), nullptr, nullptr, const_cast<char**>(arguments), environ), 0);
    return pid;
  }

  // Exit code of the shim.
  static int Wait(pid_t pid) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  v1::ExitRecord Exit() {
    v1::ExitRecord record;
    const absl::Status status = spool::ReadProto(files_->ExitPath(kRank), &record);
    EXPECT_TRUE(status.ok()) << status;
    return record;
  }

  v1::ProcessRecord Process() {
    v1::ProcessRecord record;
    EXPECT_TRUE(spool::ReadProto(files_->ProcessPath(kRank), &record).ok());
    return record;
  }

  spool::ProcessIdentity RankIdentity() {
    const v1::ProcessRecord record = Process();
    return {record.boot_id(), record.rank_pid(), record.rank_start_ticks()};
  }

  bool LogHas(const std::string& text) {
    const auto log = spool::ReadFile(files_->LogPath(kRank));
    return log.ok() && log->find(text) != std::string::npos;
  }

  std::string directory_;
  std::string program_;
  std::unique_ptr<spool::AttemptDirectory> files_;
};

TEST_F(ShimTest, RecordsExitCodeAndPassesSpecThreadsAndDevice) {
  WriteScript(
      "echo \"$1 $2 omp=$OMP_NUM_THREADS cuda=$CUDA_VISIBLE_DEVICES\"; test -e \"${2%.spec}.proc\" && echo has-proc; exit 42");
  EXPECT_EQ(Wait(StartShim()), 0);
  const v1::ExitRecord record = Exit();
  EXPECT_EQ(record.exit_code(), 42);
  EXPECT_EQ(record.signal(), 0);
  EXPECT_GT(record.max_rss_bytes(), 0);
  EXPECT_GT(record.time().seconds(), 0);
  EXPECT_TRUE(LogHas("--spec " + files_->SpecPath(kRank) + " omp=7 cuda=GPU-1"));
  EXPECT_TRUE(LogHas("has-proc"));
  EXPECT_FALSE(spool::IsAlive(RankIdentity()));
}

TEST_F(ShimTest, RecordsTheSignalOfACrash) {
  WriteScript("kill -SEGV $$");
  EXPECT_EQ(Wait(StartShim()), 0);
  EXPECT_EQ(Exit().signal(), SIGSEGV);
  EXPECT_EQ(Exit().exit_code(), -1);
}

TEST_F(ShimTest, ForwardsSigterm) {
  WriteScript("trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.05; done");
  const pid_t shim = StartShim();
  ASSERT_TRUE(Eventually([&] { return LogHas("ready"); }));
  ::kill(shim, SIGTERM);
  EXPECT_EQ(Wait(shim), 0);
  EXPECT_EQ(Exit().exit_code(), 5);
  EXPECT_TRUE(LogHas("saved"));
}

TEST_F(ShimTest, AKilledShimTakesItsRankWithIt) {
  WriteScript("echo ready; exec sleep 100");
  const pid_t shim = StartShim();
  ASSERT_TRUE(Eventually([&] { return LogHas("ready"); }));
  const spool::ProcessIdentity rank = RankIdentity();
  EXPECT_TRUE(spool::IsAlive(rank));
  EXPECT_EQ(Process().shim_pid(), shim);
  ::kill(shim, SIGKILL);
  EXPECT_EQ(Wait(shim), -SIGKILL);
  EXPECT_TRUE(Eventually([&] { return !spool::IsAlive(rank); }));
  EXPECT_FALSE(std::filesystem::exists(files_->ExitPath(kRank)));
}

TEST_F(ShimTest, KillsWhatTheRankLeavesRunningAlsoOutsideItsSession) {
  WriteScript("sleep 100 & echo \"child $!\"; setsid sleep 100 & echo \"child $!\"; sleep 0.2; exit 0");
  EXPECT_EQ(Wait(StartShim()), 0);
  std::ifstream log(files_->LogPath(kRank));
  std::string word;
  pid_t pid = 0;
  int children = 0;
  while (log >> word >> pid) {
    ++children;
    EXPECT_NE(::kill(pid, 0), 0) << pid;
  }
  EXPECT_EQ(children, 2);
  EXPECT_EQ(Exit().exit_code(), 0);
}

TEST_F(ShimTest, TheClaimHasOneWinner) {
  WriteScript("echo ran >> \"$(dirname \"$2\")/runs\"");
  ASSERT_TRUE(spool::WriteProtoExclusively(files_->ProcessPath(kRank), v1::ProcessRecord()).ok());
  EXPECT_EQ(Wait(StartShim()), 3);
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/runs"));
  EXPECT_FALSE(std::filesystem::exists(files_->ExitPath(kRank)));

  std::filesystem::remove(files_->ProcessPath(kRank));
  const pid_t first = StartShim();
  const pid_t second = StartShim();
  EXPECT_EQ(Wait(first) + Wait(second), 3);
  EXPECT_EQ(*spool::ReadFile(directory_ + "/runs"), "ran\n");
}

TEST_F(ShimTest, AProgramThatCannotBeExecutedIsNamed) {
  program_ = directory_ + "/missing";
  EXPECT_EQ(Wait(StartShim()), 0);
  EXPECT_EQ(Exit().exit_code(), 127);
  v1::RankResult result;
  ASSERT_TRUE(spool::ReadProto(files_->ResultPath(kRank), &result).ok());
  EXPECT_EQ(result.reason(), v1::REASON_SPAWN_FAILED);
  EXPECT_THAT(result.detail(), testing::HasSubstr("/missing: No such file"));
}

TEST_F(ShimTest, RefusesAMissingSpecAndBadArguments) {
  WriteScript("exit 0");
  std::filesystem::remove(files_->SpecPath(kRank));
  EXPECT_EQ(Wait(StartShim()), 4);
  const char* arguments[] = {"mbshim", "--spec", nullptr};
  pid_t pid = 0;
  ASSERT_EQ(::posix_spawn(&pid, MB_BINARY_DIR "/bin/mbshim", nullptr, nullptr, const_cast<char**>(arguments), environ), 0);
  EXPECT_EQ(Wait(pid), 2);
}

}  // namespace
}  // namespace mbridge::shim
