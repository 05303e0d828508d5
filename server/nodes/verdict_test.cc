#include "server/nodes/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace mbridge::server {
namespace {

v1::RankEnd End(int rank, v1::Reason reason, int64_t second = 0, int exit_code = 1, int signal = 0) {
  v1::RankEnd end;
  end.set_rank(rank);
  end.set_reason(reason);
  end.set_exit_code(exit_code);
  end.set_signal(signal);
  end.mutable_time()->set_seconds(second);
  return Normalized(end);
}

v1::Attempt Attempt(const std::vector<v1::RankEnd>& ends, int ranks = 0) {
  v1::Attempt attempt;
  for (int rank = 0; rank < std::max<int>(ranks, ends.size()); ++rank) attempt.add_placement()->set_rank(rank);
  for (const auto& end : ends) *attempt.add_rank_ends() = end;
  return attempt;
}

v1::Job JobWithEnds(const std::vector<v1::Reason>& reasons, int max_restarts = 0) {
  v1::Job job;
  job.set_state(v1::JOB_STATE_RUNNING);
  job.mutable_spec()->set_max_restarts(max_restarts);
  for (const v1::Reason reason : reasons) {
    auto* attempt = job.add_attempts();
    attempt->set_reason(reason);
    attempt->mutable_end_time()->set_seconds(1);
  }
  return job;
}

TEST(Cause, OnlyAResultIsSuccess) {
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_COMPLETED, 1, 0)}), {}, false).reason, v1::REASON_COMPLETED);
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_UNSPECIFIED, 1, 0)}), {}, false).reason, v1::REASON_RANK_EXITED_WITHOUT_REASON);
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_COMPLETED, 1, 0)}, 2), {}, false).reason, v1::REASON_RANK_EXITED_WITHOUT_REASON)
      << "a rank that never reported";
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_COMPLETED, 1, -1, SIGSEGV)}), {}, false).reason, v1::REASON_RANK_CRASHED);
}

TEST(Cause, ALostPeerIsNeverTheCauseWhereThereIsOne) {
  const Cause cause = CauseOf(
      Attempt({End(0, v1::REASON_PEER_LOST, 1), End(1, v1::REASON_NAN_LOSS, 2), End(2, v1::REASON_UNSPECIFIED, 0, -1, SIGKILL)}),
      {2}, false);
  EXPECT_EQ(cause.reason, v1::REASON_NAN_LOSS);
  EXPECT_THAT(cause.detail, ::testing::StartsWith("rank 1"));
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_PEER_LOST, 1), End(1, v1::REASON_UNSPECIFIED, 5, -1, SIGKILL)}), {}, false).reason,
            v1::REASON_RANK_CRASHED);
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_PEER_LOST, 1)}), {}, false).reason, v1::REASON_PEER_LOST) << "better than nothing";
}

TEST(Cause, AKilledRankIsWhatTheOthersWaitedFor) {
  const Cause cause =
      CauseOf(Attempt({End(0, v1::REASON_COLLECTIVE_TIMEOUT, 1), End(1, v1::REASON_COLLECTIVE_TIMEOUT, 5, -1, SIGKILL),
                       End(2, v1::REASON_COLLECTIVE_TIMEOUT, 0)}),
              {}, false);
  EXPECT_EQ(cause.reason, v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_THAT(cause.detail, ::testing::StartsWith("rank 1"));
}

TEST(Cause, AStoppedRankOfAnotherNodeIsWhatTheOthersWaitedFor) {
  const Cause cause =
      CauseOf(Attempt({End(0, v1::REASON_COLLECTIVE_TIMEOUT, 1), End(1, v1::REASON_COLLECTIVE_TIMEOUT, 12, -1, SIGKILL),
                       End(2, v1::REASON_KILLED_BY_USER, 12, -1, SIGKILL)}),
              {1, 2}, false);
  EXPECT_EQ(cause.reason, v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_THAT(cause.detail, ::testing::StartsWith("rank 1"));
}

TEST(Cause, AForeignSigtermIsACrash) {
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_CANCELLED_BY_USER, 1)}), {}, false).reason, v1::REASON_RANK_CRASHED);
  EXPECT_EQ(CauseOf(Attempt({End(0, v1::REASON_CANCELLED_BY_USER, 1)}), {}, true).reason, v1::REASON_CANCELLED_BY_USER);
}

TEST(Verdict, CrashesRestartThreeTimesByDefault) {
  const Cause crash{v1::REASON_RANK_CRASHED, "signal 9"};
  Verdict verdict = Judge(JobWithEnds({v1::REASON_RANK_CRASHED}), crash);
  EXPECT_EQ(verdict.state, v1::JOB_STATE_QUEUED);
  EXPECT_EQ(verdict.reason, v1::REASON_WAITING_FOR_RETRY);
  EXPECT_EQ(verdict.back_off, std::chrono::seconds(1));
  verdict = Judge(JobWithEnds(std::vector(3, v1::REASON_RANK_CRASHED)), crash);
  EXPECT_EQ(verdict.state, v1::JOB_STATE_QUEUED);
  EXPECT_EQ(verdict.back_off, std::chrono::seconds(4));
  verdict = Judge(JobWithEnds(std::vector(4, v1::REASON_RANK_CRASHED)), crash);
  EXPECT_EQ(verdict.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(verdict.reason, v1::REASON_TOO_MANY_RESTARTS);
  EXPECT_THAT(verdict.detail, ::testing::HasSubstr("RANK_CRASHED: signal 9"));
}

TEST(Verdict, ProgressShortensTheBackOff) {
  v1::Job job = JobWithEnds(std::vector(3, v1::REASON_RANK_CRASHED), 100);
  job.mutable_attempts(2)->set_last_step(7);
  EXPECT_EQ(Judge(job, {v1::REASON_RANK_CRASHED, ""}).back_off, std::chrono::seconds(1));
}

TEST(Verdict, MinusOneMeansNoRestartAndKeepsTheReason) {
  const Verdict verdict = Judge(JobWithEnds({v1::REASON_RANK_CRASHED}, -1), {v1::REASON_RANK_CRASHED, ""});
  EXPECT_EQ(verdict.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(verdict.reason, v1::REASON_RANK_CRASHED);
}

TEST(Verdict, LostNodesAreCountedApart) {
  std::vector<v1::Reason> reasons(5, v1::REASON_NODE_LOST);
  EXPECT_EQ(Judge(JobWithEnds(reasons), {v1::REASON_NODE_LOST, ""}).state, v1::JOB_STATE_QUEUED);
  reasons.push_back(v1::REASON_RANK_CRASHED);
  EXPECT_EQ(Judge(JobWithEnds(reasons), {v1::REASON_RANK_CRASHED, ""}).state, v1::JOB_STATE_QUEUED);
  reasons.assign(kMaxInfrastructureRestarts + 1, v1::REASON_NODE_LOST);
  EXPECT_EQ(Judge(JobWithEnds(reasons), {v1::REASON_NODE_LOST, ""}).reason, v1::REASON_TOO_MANY_RESTARTS);
}

TEST(Verdict, AnErrorOfTheJobItselfEndsIt) {
  const Verdict verdict = Judge(JobWithEnds({v1::REASON_NAN_LOSS}), {v1::REASON_NAN_LOSS, "step 7"});
  EXPECT_EQ(verdict.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(verdict.reason, v1::REASON_NAN_LOSS);
}

TEST(Verdict, AStopEndsAsAskedOrAsTheJobEndedBefore) {
  v1::Job job = JobWithEnds({v1::REASON_CANCELLED_BY_USER});
  job.set_state(v1::JOB_STATE_STOPPING);
  job.set_reason(v1::REASON_CANCELLED_BY_USER);
  EXPECT_EQ(Judge(job, {v1::REASON_CANCELLED_BY_USER, "stopped after iteration 3"}).state, v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Judge(job, {v1::REASON_CANCELLED_BY_USER, "stopped after iteration 3"}).detail, "stopped after iteration 3");
  EXPECT_EQ(Judge(job, {v1::REASON_RANK_CRASHED, ""}).reason, v1::REASON_CANCELLED_BY_USER);
  EXPECT_EQ(Judge(job, {v1::REASON_COMPLETED, ""}).state, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Judge(job, {v1::REASON_DISK_FULL, ""}).reason, v1::REASON_DISK_FULL) << "the last save did not work";
  job.set_reason(v1::REASON_WALL_TIME_EXCEEDED);
  EXPECT_EQ(Judge(job, {v1::REASON_CANCELLED_BY_USER, ""}).state, v1::JOB_STATE_FAILED);
}

}  // namespace
}  // namespace mbridge::server
