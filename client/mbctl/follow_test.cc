// Following and waiting: lines, exit codes, lost connections, time-outs, Ctrl-C.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "client/mbctl/testing/command_fixture.h"

namespace mbridge::mbctl {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Mbctl, FollowPrintsMegatronLinesOnStdoutOnly) {
  AcceptJobs();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--follow"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("] iteration        1/       2 | consumed samples:"), HasSubstr("lm loss: 1.042070E+01"),
                    HasSubstr("lm loss: NaN"), HasSubstr(" validation loss at iteration 2 | lm loss value: 9.500000E+00"),
                    Not(HasSubstr("\x1b")), Not(HasSubstr("queued"))));
  EXPECT_EQ(result.out[0], ' ');
  EXPECT_THAT(result.err, AllOf(HasSubstr("queued, WAITING_FOR_SLOTS: needs 4 slots"), HasSubstr("running"),
                                HasSubstr("succeeded, COMPLETED"), Not(HasSubstr("\x1b"))));
}

TEST_F(Mbctl, FollowShowsThroughputWhereTheJobLogsIt) {
  bool on = false;
  fake_.jobs.get = [&on](const auto&, v1::GetJobResponse* response) {
    response->mutable_job()->set_job_id("j-abc");
    response->mutable_job()->mutable_resolved()->mutable_config()->mutable_logger()->set_log_throughput(on);
    return grpc::Status::OK;
  };
  fake_.jobs.create = [&on](const auto&, v1::CreateJobResponse* response) {
    response->mutable_job()->set_job_id("j-abc");
    response->mutable_job()->mutable_resolved()->mutable_config()->mutable_logger()->set_log_throughput(on);
    return grpc::Status::OK;
  };
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  EXPECT_THAT(Run({"follow", "j-abc"}).out, Not(HasSubstr("TFLOP/s/GPU")));
  on = true;
  EXPECT_THAT(Run({"follow", "j-abc"}).out, HasSubstr("| throughput per GPU (TFLOP/s/GPU): 0.0 |"));
  EXPECT_THAT(Run({"submit", "-r", "x", "--follow"}).out, HasSubstr("TFLOP/s/GPU"));
}

TEST_F(Mbctl, FollowAsJsonLines) {
  AcceptJobs();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--follow", "-o", "json"});
  EXPECT_EQ(result.code, 0);
  std::istringstream lines(result.out);
  int points = 0;
  nlohmann::json last;
  for (std::string line; std::getline(lines, line);) {
    last = nlohmann::json::parse(line);
    if (last.contains("points")) ++points;
  }
  EXPECT_EQ(points, 3);
  EXPECT_EQ(last["end"]["state"], "JOB_STATE_SUCCEEDED");
}

TEST_F(Mbctl, WaitExitsAsTheJobDoes) {
  AcceptJobs();
  KnowJob();
  fake_.Start();
  const std::tuple<v1::JobState, v1::Reason, int> ends[] = {{v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED, 0},
                                                            {v1::JOB_STATE_FAILED, v1::REASON_NAN_LOSS, 1},
                                                            {v1::JOB_STATE_FAILED, v1::REASON_CHECKPOINT_CORRUPT, 9},
                                                            {v1::JOB_STATE_CANCELLED, v1::REASON_CANCELLED_BY_USER, 5},
                                                            {v1::JOB_STATE_FAILED, v1::REASON_WALL_TIME_EXCEEDED, 6}};
  for (const auto& [state, reason, code] : ends) {
    TrainAndEnd(state, reason, "because");
    const Result result = Run({"submit", "-r", "x", "--wait"});
    EXPECT_EQ(result.code, code) << ReasonName(reason);
    EXPECT_THAT(result.err, HasSubstr(ReasonName(reason) + ": because"));
    EXPECT_EQ(Run({"wait", "run-1"}).code, code);
  }
  EXPECT_EQ(Run({"wait", "nobody"}).code, 3);
}

TEST_F(Mbctl, WaitAsJsonIsTheEndedJob) {
  AcceptJobs();
  KnowJob();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const auto json = nlohmann::json::parse(Run({"submit", "-r", "x", "--wait", "-o", "json"}).out);
  EXPECT_EQ(json["state"], "JOB_STATE_SUCCEEDED");
}

void HangUntilCancelled(grpc::ServerContext* context) {
  while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
}

TEST_F(Mbctl, LostConnectionIsSevenAndSaysSo) {
  KnowJob();
  fake_.jobs.watch = [](grpc::ServerContext* context, const auto&, auto* writer) {
    writer->Write(State(1, v1::JOB_STATE_RUNNING));
    HangUntilCancelled(context);
    return grpc::Status::CANCELLED;
  };
  fake_.jobs.metrics = [](grpc::ServerContext* context, const auto&, auto*) {
    HangUntilCancelled(context);
    return grpc::Status::CANCELLED;
  };
  fake_.Start();
  std::jthread killer([this] {
    std::this_thread::sleep_for(milliseconds(300));
    fake_.Stop();
  });
  const Result result = Run({"follow", "j-abc"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, AllOf(HasSubstr("connection lost, job state unknown"), HasSubstr("mbctl get j-abc")));
}

TEST_F(Mbctl, TimeoutIsSixAndTheJobGoesOn) {
  KnowJob();
  fake_.jobs.watch = [](grpc::ServerContext* context, const auto&, auto* writer) {
    writer->Write(State(1, v1::JOB_STATE_RUNNING));
    HangUntilCancelled(context);
    return grpc::Status::CANCELLED;
  };
  fake_.Start();
  const Result result = Run({"wait", "j-abc", "--timeout", "0.2"},
                            [](auto* options) { options->silence_limit = options->lost_after = std::chrono::seconds(20); });
  EXPECT_EQ(result.code, 6);
  EXPECT_THAT(result.err, HasSubstr("job j-abc goes on"));
  EXPECT_EQ(Run({"wait", "j-abc", "--timeout", "soon"}).code, 2);
}

class Interrupted : public Mbctl {
 protected:
  void SetUp() override {
    KnowJob();
    fake_.jobs.watch = [this](grpc::ServerContext* context, const auto&, auto* writer) {
      writer->Write(State(1, v1::JOB_STATE_RUNNING));
      watching_ = true;
      while (!context->IsCancelled() && !cancelled_) std::this_thread::sleep_for(milliseconds(5));
      if (!cancelled_) return grpc::Status::CANCELLED;
      v1::WatchJobResponse last;
      *last.mutable_end() = End(v1::JOB_STATE_CANCELLED, v1::REASON_CANCELLED_BY_USER);
      writer->Write(last);
      return grpc::Status::OK;
    };
    fake_.jobs.cancel = [this](const v1::CancelJobRequest& request, v1::CancelJobResponse* response) {
      EXPECT_FALSE(request.kill());
      response->mutable_job()->set_job_id(request.job_id());
      cancelled_ = true;
      return grpc::Status::OK;
    };
    fake_.Start();
  }
  Result RunAndInterrupt(std::vector<std::string> arguments, int signal = SIGINT) {
    std::jthread user([this, signal] {
      while (!watching_) std::this_thread::sleep_for(milliseconds(5));
      std::this_thread::sleep_for(milliseconds(50));
      kill(getpid(), signal);
    });
    return Run(std::move(arguments),
               [](auto* options) { options->silence_limit = options->lost_after = std::chrono::seconds(20); });
  }
  std::atomic<bool> watching_{false}, cancelled_{false};
};

TEST_F(Interrupted, CtrlCDetaches) {
  const Result result = RunAndInterrupt({"wait", "j-abc"});
  EXPECT_EQ(result.code, 130);
  EXPECT_THAT(result.err, AllOf(HasSubstr("job j-abc goes on"), HasSubstr("mbctl follow j-abc")));
  EXPECT_FALSE(cancelled_);
}

TEST_F(Interrupted, CancelOnInterruptCancelsAndReportsTheEnd) {
  const Result result = RunAndInterrupt({"wait", "j-abc", "--cancel-on-interrupt"});
  EXPECT_EQ(result.code, 5);
  EXPECT_TRUE(cancelled_);
}

TEST_F(Interrupted, CancelOnInterruptCancelsWhenARunnerEndsIt) {
  const Result result = RunAndInterrupt({"wait", "j-abc", "--cancel-on-interrupt"}, SIGTERM);
  EXPECT_EQ(result.code, 5);
  EXPECT_TRUE(cancelled_);
}

TEST_F(Interrupted, CancelGoesOnAfterAWrongName) {
  const Result result = Run({"cancel", "j-000", "j-abc"});
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.err, HasSubstr("j-000"));
  EXPECT_TRUE(cancelled_);
}

TEST(ParseDuration, UnitsAndErrors) {
  EXPECT_EQ(*ParseDuration("90"), 90);
  EXPECT_EQ(*ParseDuration("1.5h"), 5400);
  EXPECT_EQ(*ParseDuration("10m"), 600);
  EXPECT_EQ(*ParseDuration("2d"), 172800);
  for (const char* wrong : {"", "h", "5x", "-3s", "0", "nan"}) EXPECT_FALSE(ParseDuration(wrong).ok()) << wrong;
}

}  // namespace
}  // namespace mbridge::mbctl
