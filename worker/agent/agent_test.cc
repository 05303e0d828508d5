// The real mbagent and mbshim against a fake coordinator, with a scripted rank program.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/agent/testing/fake_coordinator.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/file.h"
#include "worker/spool/process_identity.h"

extern char** environ;

namespace mbridge::agent {
namespace {

using ::testing::AllOf;
using testing::AttemptView;
using testing::FakeCoordinator;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "agent_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    state_ = directory_ + "/state";
    coordinator_ = std::make_unique<FakeCoordinator>(directory_ + "/c.sock");
    StartAgent();
  }

  void TearDown() override {
    // Whatever a failed test left behind: the agent knows its ranks, a shutdown ends them.
    v1::NodeTask task;
    task.set_task_id("teardown");
    task.mutable_shutdown();
    coordinator_->AddTask(task);
    if (agent_ == 0) StartAgent();
    EXPECT_EQ(WaitForAgent(), 0);
    EXPECT_THAT(coordinator_->Complaints(), IsEmpty());
    std::filesystem::remove_all(directory_);
  }

  pid_t SpawnAgent() {
    const std::vector<std::string> words = {std::string(MB_BINARY_DIR) + "/bin/mbagent",
                                            "--coordinator",
                                            "unix:" + directory_ + "/c.sock",
                                            "--state-dir",
                                            state_,
                                            "--cpu-slots",
                                            "3",
                                            "--rank-program",
                                            rank_program_};
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    pid_t pid = 0;
    EXPECT_EQ(::posix_spawn(&pid, arguments[0], nullptr, nullptr, arguments.data(), environ), 0);
    return pid;
  }

  void StartAgent() { agent_ = SpawnAgent(); }

  int Wait(pid_t pid) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  int WaitForAgent() { return Wait(std::exchange(agent_, 0)); }

  void KillAgent() {
    ::kill(agent_, SIGKILL);
    WaitForAgent();
  }

  static bool Eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) return true;
      ::usleep(10'000);
    }
    return false;
  }

  std::vector<v1::RankSpec> Specs(const std::string& job, int attempt, const std::string& script, int ranks = 1) {
    std::vector<v1::RankSpec> specs(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      v1::RankSpec& spec = specs[static_cast<size_t>(r)];
      spec.set_job_id(job);
      spec.set_attempt(attempt);
      spec.set_rank(r);
      spec.set_world_size(ranks);
      spec.set_run_name(script);
      spec.set_threads(1);
    }
    return specs;
  }

  void Run(const std::string& job, const std::string& script, int ranks = 1, int attempt = 1) {
    coordinator_->Order(job, attempt, v1::DESIRED_STATE_RUN, Specs(job, attempt, script, ranks));
  }

  bool WaitForRecords(const std::string& job, size_t count) {
    return Eventually([&] { return coordinator_->View(job).records.size() >= count; });
  }
  bool WaitForPhase(const std::string& job, v1::AttemptPhase phase, int attempt = 1) {
    return Eventually([&] { return coordinator_->View(job, attempt).last.phase() == phase; });
  }
  bool WaitForLog(const std::string& job, const std::string& text) {
    return Eventually([&] { return coordinator_->View(job).logs[0].find(text) != std::string::npos; });
  }
  // The ends once everything has been reported.
  std::vector<v1::RankEnd> WaitForEnds(const std::string& job, int attempt = 1) {
    EXPECT_TRUE(Eventually([&] { return coordinator_->View(job, attempt).last.drained(); })) << job;
    const v1::AttemptReport report = coordinator_->View(job, attempt).last;
    return {report.rank_ends().begin(), report.rank_ends().end()};
  }

  spool::AttemptDirectory Files(const std::string& job, int attempt = 1) {
    return spool::AttemptDirectory(state_ + "/attempts/" + job + "." + std::to_string(attempt));
  }
  spool::ProcessIdentity RankOf(const std::string& job, int rank = 0, int attempt = 1) {
    v1::ProcessRecord record;
    EXPECT_TRUE(spool::ReadProto(Files(job, attempt).ProcessPath(rank), &record).ok());
    return {record.boot_id(), record.rank_pid(), record.rank_start_ticks()};
  }

  std::string directory_;
  std::string state_;
  std::string rank_program_ = MB_BINARY_DIR "/tests/mb_testing_rank";
  std::unique_ptr<FakeCoordinator> coordinator_;
  pid_t agent_ = 0;
};

size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST_F(AgentTest, RunsAnAttemptToItsEndReportsAllAndForgetsItForGood) {
  Run("j-1", "records=30 log=300000 end=complete");
  const std::vector<v1::RankEnd> ends = WaitForEnds("j-1");
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].reason(), v1::REASON_COMPLETED);
  EXPECT_EQ(ends[0].exit_code(), 0);
  const AttemptView view = coordinator_->View("j-1");
  ASSERT_EQ(view.records.size(), 30u);
  EXPECT_EQ(view.records[29].metric().step(), 30);
  EXPECT_THAT(view.logs.at(0), AllOf(HasSubstr("started"), HasSubstr(std::string(300000, 'x'))));
  EXPECT_EQ(coordinator_->LastRequest().inventory().cpu_cores(), 3);

  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_FORGET);
  EXPECT_TRUE(Eventually([&] { return !coordinator_->Knows("j-1"); }));
  EXPECT_FALSE(std::filesystem::exists(Files("j-1").path()));
  // A late order does not run it again.
  const int syncs = coordinator_->syncs();
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_RUN);
  ASSERT_TRUE(Eventually([&] { return coordinator_->syncs() > syncs + 3; }));
  EXPECT_FALSE(std::filesystem::exists(Files("j-1").path()));
  // The agent, the parent of the shim, left no zombie.
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto stat = spool::StatOf(std::atoi(entry.path().filename().c_str()));
    EXPECT_FALSE(stat.ok() && stat->parent == agent_) << entry.path();
  }
}

TEST_F(AgentTest, AKilledAgentTakesItsRankUpAgainWithoutGapOrRepetition) {
  Run("j-1", "records=200 interval=10 end=complete");
  ASSERT_TRUE(WaitForRecords("j-1", 20));
  const spool::ProcessIdentity rank = RankOf("j-1");
  for (size_t records : {50u, 90u}) {
    KillAgent();
    EXPECT_TRUE(spool::IsAlive(rank));
    ::usleep(100'000);
    StartAgent();
    ASSERT_TRUE(WaitForRecords("j-1", records));
    EXPECT_EQ(RankOf("j-1"), rank);
  }
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_COMPLETED);
  EXPECT_EQ(coordinator_->View("j-1").records.size(), 200u);
  EXPECT_EQ(Count(coordinator_->View("j-1").logs[0], "started"), 1u);
}

TEST_F(AgentTest, AnAgentThatIsKilledAtAnyMomentOfAStartStartsTheRankOnce) {
  for (int i = 0; i < 8; ++i) {
    const std::string job = "j-" + std::to_string(i);
    Run(job, "records=5 interval=5 end=complete");
    ::usleep(static_cast<useconds_t>(i) * 12'000);
    KillAgent();
    StartAgent();
    EXPECT_EQ(WaitForEnds(job).at(0).reason(), v1::REASON_COMPLETED) << i;
    EXPECT_EQ(coordinator_->View(job).records.size(), 5u) << i;
    EXPECT_EQ(Count(coordinator_->View(job).logs[0], "started"), 1u) << i;
  }
}

TEST_F(AgentTest, AnEndWhileTheAgentIsAwayIsReportedAfterwards) {
  Run("j-1", "records=20 interval=20 end=signal:11");
  ASSERT_TRUE(WaitForRecords("j-1", 2));
  KillAgent();
  ASSERT_TRUE(Eventually([&] { return std::filesystem::exists(Files("j-1").ExitPath(0)); }));
  StartAgent();
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_RANK_CRASHED);
  EXPECT_EQ(end.signal(), SIGSEGV);
  EXPECT_THAT(end.detail(), AllOf(HasSubstr("signal 11"), HasSubstr("started")));

  Run("j-2", "end=signal:9");  // Its log does not know of it.
  EXPECT_EQ(WaitForEnds("j-2").at(0).detail(), "signal 9 (Killed)");
  EXPECT_EQ(coordinator_->View("j-1").records.size(), 20u);
}

TEST_F(AgentTest, RanksGoOnWithoutACoordinatorAndTheSeriesHasNoGap) {
  Run("j-1", "records=150 interval=10 end=complete");
  ASSERT_TRUE(WaitForRecords("j-1", 10));
  const spool::ProcessIdentity rank = RankOf("j-1");
  coordinator_->Stop();
  ::usleep(700'000);
  EXPECT_TRUE(spool::IsAlive(rank));
  coordinator_->Start();
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_COMPLETED);
  EXPECT_EQ(coordinator_->View("j-1").records.size(), 150u);
}

TEST_F(AgentTest, StopLetsTheRankSaveAndKillDoesNot) {
  Run("j-stop", "end=hang");
  Run("j-kill", "end=hang ignore_term=1");
  ASSERT_TRUE(WaitForLog("j-stop", "started"));
  ASSERT_TRUE(WaitForLog("j-kill", "started"));
  coordinator_->Order("j-stop", 1, v1::DESIRED_STATE_STOP);
  coordinator_->Order("j-kill", 1, v1::DESIRED_STATE_KILL);
  const v1::RankEnd stopped = WaitForEnds("j-stop").at(0);
  EXPECT_EQ(stopped.reason(), v1::REASON_CANCELLED_BY_USER);
  EXPECT_EQ(stopped.exit_code(), 0);
  const v1::RankEnd killed = WaitForEnds("j-kill").at(0);
  EXPECT_EQ(killed.reason(), v1::REASON_KILLED_BY_USER);
  EXPECT_EQ(killed.signal(), SIGKILL);
  EXPECT_EQ(killed.exit_code(), -1);
}

TEST_F(AgentTest, EndsWithoutAReasonAreNeverASuccess) {
  Run("j-zero", "end=silent:0");
  Run("j-seven", "end=silent:7");
  EXPECT_EQ(WaitForEnds("j-zero").at(0).reason(), v1::REASON_RANK_EXITED_WITHOUT_REASON);
  const v1::RankEnd seven = WaitForEnds("j-seven").at(0);
  EXPECT_EQ(seven.reason(), v1::REASON_RANK_EXITED_WITHOUT_REASON);
  EXPECT_EQ(seven.exit_code(), 7);
}

TEST_F(AgentTest, PeersOfACrashedRankAreStoppedAndSaySo) {
  Run("j-1", "end0=signal:6 end1=hang", 2);
  const std::vector<v1::RankEnd> ends = WaitForEnds("j-1");
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].reason(), v1::REASON_RANK_CRASHED);
  EXPECT_EQ(ends[0].signal(), SIGABRT);
  EXPECT_EQ(ends[1].reason(), v1::REASON_PEER_LOST);
  // The same conclusion from the files alone.
  KillAgent();
  const int reports = coordinator_->View("j-1").reports;
  StartAgent();
  ASSERT_TRUE(Eventually([&] { return coordinator_->View("j-1").reports > reports + 1; }));
  const v1::AttemptReport report = coordinator_->View("j-1").last;
  EXPECT_EQ(report.rank_ends(0).reason(), v1::REASON_RANK_CRASHED);
  EXPECT_EQ(report.rank_ends(1).reason(), v1::REASON_PEER_LOST);
}

TEST_F(AgentTest, AStoppedRankIsWhatItsPeersWaitedFor) {
  Run("j-1", "end0=reason:14 end1=signal:19", 2);  // COLLECTIVE_TIMEOUT; SIGSTOP.
  const std::vector<v1::RankEnd> ends = WaitForEnds("j-1");
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].reason(), v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_EQ(ends[1].reason(), v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_EQ(ends[1].signal(), SIGKILL);
  EXPECT_THAT(ends[1].detail(), HasSubstr("waited for it in vain"));
}

TEST_F(AgentTest, AStoppedRankThatTheCoordinatorKillsIsWhatPeersElsewhereWaitedFor) {
  Run("j-1", "end=signal:19");
  ASSERT_TRUE(WaitForLog("j-1", "started"));
  const spool::ProcessIdentity rank = RankOf("j-1");
  for (int i = 0; i < 500; ++i) {
    const auto stat = spool::StatOf(rank.pid);
    if (stat.ok() && stat->state == 'T') break;
    ::usleep(10'000);
  }
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_KILL);
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_EQ(end.signal(), SIGKILL);
}

TEST_F(AgentTest, AKilledShimEndsItsRankAndIsNoticed) {
  Run("j-1", "end=hang");
  ASSERT_TRUE(WaitForLog("j-1", "started"));
  const spool::ProcessIdentity rank = RankOf("j-1");
  v1::ProcessRecord record;
  ASSERT_TRUE(spool::ReadProto(Files("j-1").ProcessPath(0), &record).ok());
  ::kill(record.shim_pid(), SIGKILL);
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_RANK_CRASHED);
  EXPECT_THAT(end.detail(), HasSubstr("without an exit record"));
  EXPECT_FALSE(spool::IsAlive(rank));
}

TEST_F(AgentTest, AnAttemptWithoutReadableSpecificationsIsEndedAndReported) {
  Run("j-1", "records=3 end=hang ignore_term=1");
  ASSERT_TRUE(WaitForRecords("j-1", 3));
  const spool::ProcessIdentity rank = RankOf("j-1");
  KillAgent();
  std::ofstream(Files("j-1").SpecPath(0)) << "\xff no message";
  StartAgent();
  ASSERT_TRUE(WaitForPhase("j-1", v1::ATTEMPT_PHASE_ENDED));
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_NODE_LOST);
  EXPECT_THAT(end.detail(), AllOf(HasSubstr("rank-0.spec"), HasSubstr("signal 9")));
  EXPECT_FALSE(spool::IsAlive(rank));
  EXPECT_EQ(coordinator_->View("j-1").records.size(), 3u);
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_FORGET);
  EXPECT_TRUE(Eventually([&] { return !std::filesystem::exists(Files("j-1").path()); }));
}

// Reading a directory fails as a bad disk does: the file may be whole.
TEST_F(AgentTest, AnAttemptThatTheDiskDoesNotGiveIsKeptAndTakenUpLater) {
  Run("j-1", "records=3 end=hang ignore_term=1");
  ASSERT_TRUE(WaitForRecords("j-1", 3));
  const spool::ProcessIdentity rank = RankOf("j-1");
  KillAgent();
  const std::filesystem::path spec = Files("j-1").SpecPath(0);
  std::filesystem::rename(spec, spec.parent_path() / "aside");
  std::filesystem::create_directory(spec);
  const int syncs = coordinator_->syncs();
  StartAgent();
  ASSERT_TRUE(Eventually([&] { return coordinator_->syncs() > syncs + 3; }));
  EXPECT_EQ(coordinator_->View("j-1").last.phase(), v1::ATTEMPT_PHASE_RUNNING);
  EXPECT_TRUE(spool::IsAlive(rank)) << "the attempt is healthy";
  std::filesystem::remove(spec);
  std::filesystem::rename(spec.parent_path() / "aside", spec);
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_KILL);
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_KILLED_BY_USER) << "taken up again before it was ended";
  EXPECT_FALSE(spool::IsAlive(rank));
}

TEST_F(AgentTest, AnUnreadableAttemptCanBeKilled) {
  Run("j-1", "records=3 end=hang ignore_term=1");
  ASSERT_TRUE(WaitForRecords("j-1", 3));
  const spool::ProcessIdentity rank = RankOf("j-1");
  KillAgent();
  const std::filesystem::path spec = Files("j-1").SpecPath(0);
  std::filesystem::remove(spec);
  std::filesystem::create_directory(spec);
  StartAgent();
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_KILL);
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_NODE_LOST);
  EXPECT_FALSE(spool::IsAlive(rank));
}

TEST_F(AgentTest, ANewerAttemptStartsAfterTheOlderOneHasEnded) {
  Run("j-1", "end=hang ignore_term=1");
  ASSERT_TRUE(WaitForLog("j-1", "started"));
  const spool::ProcessIdentity older = RankOf("j-1");
  Run("j-1", "records=3 end=complete", 1, 2);
  EXPECT_EQ(WaitForEnds("j-1", 2).at(0).reason(), v1::REASON_COMPLETED);
  EXPECT_FALSE(spool::IsAlive(older));
  EXPECT_EQ(WaitForEnds("j-1", 1).at(0).reason(), v1::REASON_PEER_LOST);
}

TEST_F(AgentTest, AMissingRankProgramIsASpawnFailure) {
  KillAgent();
  rank_program_ = directory_ + "/none";
  StartAgent();
  Run("j-1", "end=complete");
  const v1::RankEnd end = WaitForEnds("j-1").at(0);
  EXPECT_EQ(end.reason(), v1::REASON_SPAWN_FAILED);
  EXPECT_THAT(end.detail(), HasSubstr("/none: No such file"));
}

TEST_F(AgentTest, RelaysRendezvousKeysOfSeveralNodes) {
  std::vector<v1::RankSpec> specs = Specs("j-1", 1, "set=rank0:here await=rank/1 end=complete");
  specs[0].set_world_size(2);  // The other rank is on another node.
  coordinator_->Order("j-1", 1, v1::DESIRED_STATE_RUN, specs);
  ASSERT_TRUE(Eventually([&] { return coordinator_->View("j-1").rendezvous.count("rank0") > 0; }));
  EXPECT_EQ(coordinator_->View("j-1").rendezvous["rank0"], "here");
  coordinator_->GiveKey("j-1", 1, "rank/1", "there");
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_COMPLETED);
  EXPECT_THAT(coordinator_->View("j-1").logs[0], HasSubstr("got rank/1=there"));
  EXPECT_EQ(coordinator_->View("j-1").rendezvous.count("rank/1"), 0u);  // Not sent back.
}

TEST_F(AgentTest, BadOrdersAreIgnored) {
  Run("../evil", "end=complete");
  Run("j-1", "end=complete");
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_COMPLETED);
  EXPECT_FALSE(std::filesystem::exists(state_ + "/evil.1"));
}

TEST_F(AgentTest, DoesPreflightVerifyAndDelete) {
  for (const char* mode : {"ok", "problem", "crash", "garbage"}) {
    v1::NodeTask task;
    task.set_task_id(mode);
    task.mutable_preflight()->mutable_spec()->set_run_name(std::string("preflight=") + mode);
    coordinator_->AddTask(task);
  }
  for (const char* name : {"fine", "corrupt"}) {
    v1::NodeTask task;
    task.set_task_id(name);
    task.mutable_verify()->set_path(directory_ + "/" + name);
    coordinator_->AddTask(task);
  }
  std::filesystem::create_directories(directory_ + "/run/step_1");
  std::ofstream(directory_ + "/run/step_1/manifest.json") << "{}";
  v1::NodeTask removal;
  removal.set_task_id("delete");
  removal.mutable_delete_()->set_path(directory_ + "/run/step_1");
  coordinator_->AddTask(removal);
  ASSERT_TRUE(Eventually([&] { return coordinator_->Results().size() == 7; }));

  auto results = coordinator_->Results();
  EXPECT_TRUE(results["ok"].ok());
  EXPECT_EQ(results["ok"].preflight().free_disk_bytes(), 123);
  EXPECT_FALSE(results["problem"].ok());
  EXPECT_EQ(results["problem"].reason(), v1::REASON_DATA_NOT_FOUND);
  EXPECT_EQ(results["problem"].preflight().problems(0).field(), "dataset.blend");
  EXPECT_EQ(results["crash"].reason(), v1::REASON_ENGINE_ERROR);
  EXPECT_THAT(results["crash"].detail(), AllOf(HasSubstr("exit code 3"), HasSubstr("preflight broke")));
  EXPECT_EQ(results["garbage"].reason(), v1::REASON_ENGINE_ERROR);
  EXPECT_TRUE(results["fine"].ok());
  EXPECT_EQ(results["fine"].bytes(), 77);
  EXPECT_EQ(results["fine"].tensors(), 5);
  EXPECT_EQ(results["corrupt"].reason(), v1::REASON_CHECKPOINT_CORRUPT);
  EXPECT_EQ(results["corrupt"].detail(), "shard 1");
  EXPECT_TRUE(results["delete"].ok());
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/run/step_1"));
  EXPECT_TRUE(Eventually([&] { return coordinator_->LastRequest().results().empty(); }));
}

TEST_F(AgentTest, SigtermLeavesTheRanksToTheNextAgentAndShutdownEndsThem) {
  Run("j-1", "end=hang");
  ASSERT_TRUE(WaitForLog("j-1", "started"));
  const std::string node = coordinator_->LastRequest().node_id();
  const std::string instance = coordinator_->LastRequest().agent_instance();
  ::kill(agent_, SIGTERM);
  EXPECT_EQ(WaitForAgent(), 0);
  const spool::ProcessIdentity rank = RankOf("j-1");
  EXPECT_TRUE(spool::IsAlive(rank));

  StartAgent();
  ASSERT_TRUE(Eventually([&] { return coordinator_->LastRequest().agent_instance() != instance; }));
  EXPECT_EQ(coordinator_->LastRequest().node_id(), node);
  v1::NodeTask task;
  task.set_task_id("bye");
  task.mutable_shutdown();
  coordinator_->AddTask(task);
  EXPECT_EQ(WaitForAgent(), 0);
  EXPECT_FALSE(spool::IsAlive(rank));
  EXPECT_TRUE(coordinator_->Results()["bye"].ok());
  EXPECT_EQ(WaitForEnds("j-1").at(0).reason(), v1::REASON_SHUTDOWN);
}

TEST_F(AgentTest, OneAgentForAStateDirectory) {
  ASSERT_TRUE(Eventually([&] { return coordinator_->syncs() > 0; }));
  EXPECT_EQ(*spool::ReadFile(state_ + "/agent.lock"), std::to_string(agent_) + "\n");
  EXPECT_EQ(Wait(SpawnAgent()), 8);
}

}  // namespace
}  // namespace mbridge::agent
