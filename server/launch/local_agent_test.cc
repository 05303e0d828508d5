#include "server/launch/local_agent.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace mbridge::server {
namespace {

class LocalAgentTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string directory_ = std::filesystem::temp_directory_path() / ("mb_launch." + std::to_string(getpid()));
};

TEST_F(LocalAgentTest, ARunningAgentIsAdopted) {
  const int fd = open((directory_ + "/agent.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  EXPECT_FALSE(LocalAgentRuns(directory_)) << "a lock file alone is no agent";
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  EXPECT_TRUE(LocalAgentRuns(directory_));
  EXPECT_EQ(*StartLocalAgent({.program = "/bin/false", .directory = directory_, .coordinator = "unix:x"}), 0);
  close(fd);
}

TEST_F(LocalAgentTest, ANewAgentHasItsOwnSessionAndItsArguments) {
  const std::string script = directory_ + "/fake_agent";
  std::ofstream(script) << "#!/bin/sh\necho \"$@\"\nsleep 60\n";
  chmod(script.c_str(), 0700);
  const auto pid = StartLocalAgent({.program = script, .directory = directory_, .coordinator = "unix:x.sock"});
  ASSERT_TRUE(pid.ok()) << pid.status();
  EXPECT_EQ(getsid(*pid), *pid);
  std::string line;
  for (int tries = 0; tries < 200 && line.empty(); ++tries) {
    usleep(10'000);
    std::ifstream log(directory_ + "/agent.log");
    std::getline(log, line);
  }
  EXPECT_EQ(line, "--coordinator unix:x.sock --state-dir " + directory_);
  kill(-*pid, SIGKILL);
  waitpid(*pid, nullptr, 0);
}

TEST_F(LocalAgentTest, AMissingProgramIsNamed) {
  const auto missing = StartLocalAgent({.program = "/nowhere/mbagent", .directory = directory_, .coordinator = "unix:x"});
  EXPECT_THAT(std::string(missing.status().message()), ::testing::HasSubstr("/nowhere/mbagent"));
}

}  // namespace
}  // namespace mbridge::server
