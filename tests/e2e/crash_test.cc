// kill -9 of each process in the middle of a run.
#include <signal.h>
#include <unistd.h>

#include <random>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

constexpr int kSteps = 60;
// Steps of at least this many milliseconds: long enough to be caught in the middle, short enough for CI.
const std::map<std::string, std::string> kSlowSteps = {{"MB_FAILPOINTS", "train.iteration=sleep:50"}};

class Crash : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }

  void ExpectUndisturbed(const std::string& job_id) {
    const v1::Job job = service_.WaitForEnd(job_id);
    EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
    EXPECT_EQ(job.attempts_size(), 1) << "training must not notice";
    EXPECT_TRUE(CompleteSeries(service_.TrainPoints(job_id), kSteps));
    EXPECT_TRUE(SoundEvents(service_.Events(job_id)));
    EXPECT_TRUE(service_.NoneLeft("mbrank"));
    EXPECT_TRUE(service_.NoneLeft("mbshim"));
  }

  pid_t RankPid() {
    EXPECT_TRUE(WaitUntil([this] { return !service_.Pids("mbrank").empty(); }, Seconds(20)));
    const auto pids = service_.Pids("mbrank");
    return pids.empty() ? -1 : pids.front();
  }

  Service service_{Service::Options{.environment = kSlowSteps}};
};

TEST_F(Crash, CoordinatorKilledTrainingGoesOn) {
  const std::string id = service_.Submit(TinyJob(kSteps));
  service_.WaitForStep(id, 5);
  const pid_t rank = RankPid();
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  sleep(1);
  EXPECT_EQ(service_.Pids("mbrank"), std::vector<pid_t>{rank});
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  ExpectUndisturbed(id);
}

TEST_F(Crash, CoordinatorAwayWhileTheJobEnds) {
  const std::string id = service_.Submit(TinyJob(kSteps));
  service_.WaitForStep(id, 5);
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  ASSERT_TRUE(service_.NoneLeft("mbrank", Seconds(60))) << "the job should have come to its end alone";
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  ExpectUndisturbed(id);
}

TEST_F(Crash, AgentKilledTrainingGoesOn) {
  const std::string id = service_.Submit(TinyJob(kSteps));
  service_.WaitForStep(id, 5);
  const auto agents = service_.Pids("mbagent");
  ASSERT_THAT(agents, SizeIs(1));
  ASSERT_EQ(kill(agents[0], SIGKILL), 0);
  ASSERT_TRUE(WaitUntil(
      [&] {
        const auto now = service_.Pids("mbagent");
        return now.size() == 1 && now[0] != agents[0];
      },
      Seconds(20)))
      << "the coordinator starts its local agent again";
  ExpectUndisturbed(id);
}

TEST_F(Crash, CoordinatorAndAgentKilledTogether) {
  const std::string id = service_.Submit(TinyJob(kSteps));
  service_.WaitForStep(id, 5);
  service_.coordinator().Signal(SIGKILL);
  for (const pid_t pid : service_.Pids("mbagent")) kill(pid, SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  ExpectUndisturbed(id);
}

TEST_F(Crash, RankKilledRestartsFromItsCheckpointWithTheSameLosses) {
  const std::string undisturbed = service_.Submit(TinyJob(kSteps));
  const std::string id = service_.Submit(TinyJob(kSteps, {"checkpoint.save_interval=10"}));
  service_.WaitForStep(id, 25);
  ASSERT_EQ(service_.WaitForEnd(undisturbed).state(), v1::JOB_STATE_SUCCEEDED);
  v1::Job job = service_.GetJob(id);
  if (!Terminal(job.state())) {
    for (const pid_t pid : service_.Pids("mbrank")) kill(pid, SIGKILL);
  }
  job = service_.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(0).reason(), v1::REASON_RANK_CRASHED);
  EXPECT_GE(job.attempts(1).first_step(), 20);
  // Repeated steps of the second attempt are points of their own; the effective series has one owner a step.
  EXPECT_TRUE(CompleteSeries(service_.TrainPoints(id, true), kSteps));
  EXPECT_TRUE(SameLosses(service_.TrainPoints(undisturbed), service_.TrainPoints(id, true)));
  EXPECT_TRUE(SoundEvents(service_.Events(id)));
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

TEST_F(Crash, RankKilledWithoutRestartsFailsWithItsReason) {
  const std::string id = service_.Submit(TinyJob(kSteps, {"--max-restarts", "-1"}));
  service_.WaitForStep(id, 3);
  ASSERT_EQ(kill(RankPid(), SIGKILL), 0);
  const v1::Job job = service_.WaitForEnd(id, Seconds(30));
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.reason(), v1::REASON_RANK_CRASHED) << job.detail();
  ASSERT_THAT(job.attempts(0).rank_ends(), SizeIs(1));
  EXPECT_EQ(job.attempts(0).rank_ends(0).signal(), SIGKILL);
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
  EXPECT_TRUE(service_.NoneLeft("mbshim"));
}

TEST_F(Crash, OneOfTwoRanksKilledLeavesNoOrphan) {
  const std::string id = service_.Submit(TinyJob(kSteps, {"--ranks", "2", "--max-restarts", "-1"}));
  service_.WaitForStep(id, 3);
  ASSERT_EQ(kill(RankPid(), SIGKILL), 0);
  const v1::Job job = service_.WaitForEnd(id, Seconds(40));
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(job.reason(), testing::AnyOf(v1::REASON_RANK_CRASHED, v1::REASON_TOO_MANY_RESTARTS)) << job.detail();
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
  EXPECT_TRUE(service_.NoneLeft("mbshim"));
}

TEST_F(Crash, CancelSurvivesACoordinatorKill) {
  const std::string id = service_.Submit(TinyJob(5000));
  service_.WaitForStep(id, 3);
  v1::CancelJobRequest request;
  request.set_job_id(id);
  request.set_kill(true);
  v1::CancelJobResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(service_.jobs().CancelJob(&context, request, &response).ok());
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  EXPECT_EQ(service_.WaitForEnd(id, Seconds(30)).state(), v1::JOB_STATE_CANCELLED);
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

// Random kills of random processes; the invariants hold whatever happens. MB_FULL=1 makes it long, MB_SEED repeats one.
TEST_F(Crash, RandomKills) {
  const bool full = getenv("MB_FULL") != nullptr;
  const unsigned seed = getenv("MB_SEED") != nullptr ? std::stoul(getenv("MB_SEED")) : std::random_device()();
  SCOPED_TRACE("MB_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const int kills = full ? 100 : 4;
  const int steps = full ? 4000 : 120;
  const std::string id = service_.Submit(TinyJob(
      steps, {"--name", "battered", "--max-restarts", "1000", "checkpoint.save_interval=10", "checkpoint.most_recent_k=3"}));
  for (int i = 0; i < kills; ++i) {
    usleep(300'000 + random() % 900'000);
    const auto victims = service_.Pids(std::vector<std::string>{"mbcoordinator", "mbagent", "mbrank"}[random() % 3]);
    if (victims.empty()) continue;
    const pid_t victim = victims[random() % victims.size()];
    if (victim == service_.coordinator().pid()) {
      service_.coordinator().Signal(SIGKILL);
      ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
      ASSERT_TRUE(service_.Start(Seconds(30))) << service_.log_text();
    } else {
      kill(victim, SIGKILL);
    }
  }
  const v1::Job job = service_.WaitForEnd(id, Seconds(full ? 900 : 120));
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_TRUE(CompleteSeries(service_.TrainPoints(id, true), steps));
  EXPECT_TRUE(SoundEvents(service_.Events(id)));
  EXPECT_THAT(service_.Checkpoints("battered"), testing::Not(IsEmpty()));
  for (const v1::Checkpoint& checkpoint : service_.Checkpoints("battered")) {
    EXPECT_THAT(service_.Mbctl({"ckpt", "verify", checkpoint.checkpoint_id()}), Exited(0));
  }
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

}  // namespace
}  // namespace mbridge::e2e
