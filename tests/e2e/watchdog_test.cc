// A rank that is stopped: its peers wait for it no longer than they may, all ranks end, the job's reason names it.
#include <signal.h>

#include <chrono>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using std::chrono::steady_clock;

constexpr int kManySteps = 100'000;
const Arguments kTwoRanks = {"--ranks", "2", "--max-restarts", "-1"};

std::map<std::string, std::string> Environment(const std::string& more_failpoints) {
  return {{"MB_FAILPOINTS", "train.iteration=sleep:20" + more_failpoints}, {"MB_WATCHDOG_SECONDS", "5"}};
}

pid_t SecondRank(const Service& service) {
  for (const pid_t pid : service.Pids("mbrank")) {
    if (ReadFile("/proc/" + std::to_string(pid) + "/cmdline").find("rank-1.spec") != std::string::npos) return pid;
  }
  return -1;
}

// Stops rank 1 of a job of two ranks; the job must end within `limit` and name it.
void StopSecondRank(Service* service, Seconds limit) {
  const std::string id = service->Submit(TinyJob(kManySteps, kTwoRanks));
  service->WaitForStep(id, 3);
  const pid_t second = SecondRank(*service);
  ASSERT_GT(second, 0);
  ASSERT_EQ(kill(second, SIGSTOP), 0);
  const auto begin = steady_clock::now();
  const v1::Job job = service->WaitForEnd(id, limit);
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.reason(), v1::REASON_COLLECTIVE_TIMEOUT) << job.detail();
  EXPECT_THAT(job.detail(), testing::StartsWith("rank 1: ")) << job.detail();
  EXPECT_GE(steady_clock::now() - begin, std::chrono::seconds(5));
  for (const v1::RankEnd& end : job.attempts(0).rank_ends()) {
    if (end.rank() == 0) {
      EXPECT_THAT(end.detail(), testing::HasSubstr("rank 1 has not run for"));
    }
  }
  EXPECT_EQ(job.attempts(0).rank_ends_size(), 2);
  EXPECT_TRUE(service->NoneLeft("mbrank"));
  EXPECT_TRUE(service->NoneLeft("mbshim"));
}

TEST(Watchdog, AStoppedRankIsNamed) {
  Service service(Service::Options{.environment = Environment("")});
  ASSERT_TRUE(service.Start()) << service.log_text();
  StopSecondRank(&service, Seconds(25));
}

// As where a driver does not come back: the training thread of rank 0 hangs while it unwinds.
TEST(Watchdog, ARankThatHangsAfterItsFaultIsEnded) {
  Service service(Service::Options{.environment = Environment(";rank.unwind=sleep:600000")});
  ASSERT_TRUE(service.Start()) << service.log_text();
  StopSecondRank(&service, Seconds(30));
}

}  // namespace
}  // namespace mbridge::e2e
