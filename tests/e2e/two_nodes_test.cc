// Two agents with one slot each, as on two machines: ranks on both, rendezvous through the coordinator.
#include <signal.h>

#include <set>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

class TwoNodes : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(service_.Start()) << service_.log_text();
    for (const char* name : {"first", "second"}) agents_.push_back(service_.StartAgent(name, {"--cpu-slots", "1"}));
    ASSERT_TRUE(WaitUntil(
        [this] {
          grpc::ClientContext context;
          v1::ListNodesResponse nodes;
          return service_.nodes().ListNodes(&context, {}, &nodes).ok() && nodes.nodes_size() == 2;
        },
        Seconds(20)));
  }

  Service service_{
      Service::Options{.extra_arguments = {"--no-local-agent"},
                       .environment = {{"MB_FAILPOINTS", "train.iteration=sleep:50"}, {"MB_WATCHDOG_SECONDS", "8"}}}};
  std::vector<Process> agents_;
};

TEST_F(TwoNodes, OneJobOnBothTrainsAsOnOne) {
  const std::string id = service_.Submit(TinyJob(8, {"--ranks", "2"}));
  const v1::Job job = service_.WaitForEnd(id);
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  std::set<std::string> nodes;
  for (const v1::RankPlacement& place : job.attempts(0).placement()) nodes.insert(place.node_id());
  EXPECT_EQ(nodes.size(), 2u);
  EXPECT_TRUE(CompleteSeries(service_.TrainPoints(id), 8));

  Service one_node;
  ASSERT_TRUE(one_node.Start()) << one_node.log_text();
  const std::string same = one_node.Submit(TinyJob(8, {"--ranks", "2"}));
  ASSERT_EQ(one_node.WaitForEnd(same).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_TRUE(SameLosses(one_node.TrainPoints(same), service_.TrainPoints(id)));
}

TEST_F(TwoNodes, KilledRankEndsItsPeerOnTheOtherNode) {
  const std::string id = service_.Submit(TinyJob(5000, {"--ranks", "2", "--max-restarts", "-1"}));
  service_.WaitForStep(id, 3);
  const auto ranks = service_.Pids("mbrank");
  ASSERT_EQ(ranks.size(), 2u);
  ASSERT_EQ(kill(ranks[0], SIGKILL), 0);
  const v1::Job job = service_.WaitForEnd(id, Seconds(40));
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.reason(), v1::REASON_RANK_CRASHED) << job.detail();
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

TEST_F(TwoNodes, StoppedRankIsNamedFromTheOtherNode) {
  const std::string id = service_.Submit(TinyJob(5000, {"--ranks", "2", "--max-restarts", "-1"}));
  service_.WaitForStep(id, 3);
  pid_t second = -1;
  for (const pid_t pid : service_.Pids("mbrank")) {
    if (ReadFile("/proc/" + std::to_string(pid) + "/cmdline").find("rank-1.spec") != std::string::npos) second = pid;
  }
  ASSERT_GT(second, 0);
  ASSERT_EQ(kill(second, SIGSTOP), 0);
  const v1::Job job = service_.WaitForEnd(id, Seconds(40));
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.reason(), v1::REASON_COLLECTIVE_TIMEOUT) << job.detail();
  EXPECT_THAT(job.detail(), testing::StartsWith("rank 1: ")) << job.detail();
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

}  // namespace
}  // namespace mbridge::e2e
