// Whole command lines against a fake coordinator: what is printed where, and the exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "client/lib/exit_code.h"
#include "client/lib/testing/fake_coordinator.h"
#include "client/mbctl/app.h"
#include "client/mbctl/completion.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/help.h"
#include "client/mbctl/session.h"
#include "client/mbctl/submit.h"

namespace mbridge::mbctl {
namespace {

using client::testing::FakeCoordinator;
using client::testing::ToGrpc;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Result {
  int code = -1;
  std::string out, err;
};

class Mbctl : public ::testing::Test {
 protected:
  Result Run(std::vector<std::string> arguments, std::function<void(client::ConnectionOptions*)> adjust = {}) {
    std::ostringstream out, err;
    Session session(out, err, Terminal(), [](const std::string&) { return std::nullopt; });
    session.connection.server = fake_.address();
    session.adjust_connection = [&](client::ConnectionOptions* options) {
      const std::string server = options->server;
      *options = fake_.Options();
      options->server = server;
      if (adjust) adjust(options);
    };
    Result result;
    result.code = RunCommandLine(&session, std::move(arguments));
    result.out = out.str();
    result.err = err.str();
    return result;
  }

  // CreateJob succeeds; the request is kept.
  void AcceptJobs() {
    fake_.jobs.create = [this](const v1::CreateJobRequest& request, v1::CreateJobResponse* response) {
      request_ = request;
      response->mutable_job()->set_job_id("j-abc");
      response->mutable_job()->set_run_name("run-1");
      *response->mutable_job()->mutable_spec() = request.spec();
      return grpc::Status::OK;
    };
  }

  static v1::WatchJobResponse State(int64_t sequence, v1::JobState state, v1::Reason reason = v1::REASON_UNSPECIFIED,
                                    const std::string& detail = "") {
    v1::WatchJobResponse message;
    auto* event = message.mutable_event();
    event->set_sequence(sequence);
    event->set_kind(v1::EVENT_KIND_STATE);
    event->set_state(state);
    event->set_reason(reason);
    event->set_detail(detail);
    event->set_attempt(1);
    return message;
  }
  static v1::StreamEnd End(v1::JobState state, v1::Reason reason, const std::string& detail = "") {
    v1::StreamEnd end;
    end.set_state(state);
    end.set_reason(reason);
    end.set_detail(detail);
    end.set_exit_code(InfoOf(reason).exit_code());
    return end;
  }
  // The job trains two steps and ends so.
  void TrainAndEnd(v1::JobState state, v1::Reason reason, const std::string& detail = "") {
    fake_.jobs.watch = [=](grpc::ServerContext*, const auto&, auto* writer) {
      writer->Write(State(1, v1::JOB_STATE_QUEUED, v1::REASON_WAITING_FOR_SLOTS, "needs 4 slots, 2 are free"));
      writer->Write(State(2, v1::JOB_STATE_RUNNING));
      writer->Write(State(3, state, reason, detail));
      v1::WatchJobResponse last;
      *last.mutable_end() = End(state, reason, detail);
      writer->Write(last);
      return grpc::Status::OK;
    };
    fake_.jobs.metrics = [=](grpc::ServerContext*, const v1::StreamMetricsRequest& request, auto* writer) {
      v1::StreamMetricsResponse message;
      for (int step = 1; step <= 2; ++step) {
        auto* point = message.add_points();
        point->set_kind(v1::METRIC_KIND_TRAIN);
        point->set_attempt(1);
        point->set_step(step);
        point->set_total_steps(2);
        point->set_lm_loss(step == 1 ? 10.4207 : std::nan(""));
        point->set_grad_norm(0.6513);
      }
      auto* validation = message.add_points();
      validation->set_kind(v1::METRIC_KIND_VALIDATION);
      validation->set_attempt(1);
      validation->set_step(2);
      validation->set_lm_loss(9.5);
      if (request.follow()) *message.mutable_end() = End(state, reason);
      writer->Write(message);
      return grpc::Status::OK;
    };
  }
  void KnowJob() {
    fake_.jobs.get = [](const v1::GetJobRequest& request, v1::GetJobResponse* response) {
      if (request.job_id() != "j-abc") {
        return ToGrpc(MakeStatus(absl::StatusCode::kNotFound, v1::REASON_JOB_NOT_FOUND, "there is no job " + request.job_id()));
      }
      v1::Job* job = response->mutable_job();
      job->set_job_id("j-abc");
      job->set_run_name("run-1");
      job->set_state(v1::JOB_STATE_SUCCEEDED);
      job->set_reason(v1::REASON_COMPLETED);
      job->mutable_spec()->set_recipe("vanilla_gpt_pretrain_config");
      job->mutable_spec()->add_overrides("train.train_iters=10");
      job->mutable_spec()->add_overrides("optimizer.lr=3e-4");
      job->mutable_spec()->set_ranks(2);
      job->add_attempts()->set_attempt(1);
      return grpc::Status::OK;
    };
    fake_.jobs.list = [](const v1::ListJobsRequest& request, v1::ListJobsResponse* response) {
      if (request.filter() == "run_name=run-1" || request.filter().find("run_name") == std::string::npos) {
        response->add_jobs()->set_job_id("j-abc");
      }
      return grpc::Status::OK;
    };
  }

  FakeCoordinator fake_;
  v1::CreateJobRequest request_;
};

// --- submit -----------------------------------------------------------------------------------------------------------

TEST_F(Mbctl, SubmitSendsWhatWasAskedFor) {
  AcceptJobs();
  fake_.Start();
  const Result result = Run({"submit", "--recipe", "vanilla_gpt_pretrain_config", "model.num_layers=2", "--ranks", "2", "--device",
                             "cpu", "--name", "mine", "+optimizer.lr=3e-4", "--label", "team=a", "--label", "x=y=z", "--priority",
                             "70", "--max-restarts", "-1", "--time-limit", "2h"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "j-abc\n");
  EXPECT_THAT(result.err, AllOf(HasSubstr("j-abc"), HasSubstr("run-1"), HasSubstr("mbctl follow j-abc")));
  const v1::JobSpec& spec = request_.spec();
  EXPECT_EQ(spec.recipe(), "vanilla_gpt_pretrain_config");
  EXPECT_THAT(spec.overrides(), ElementsAre("model.num_layers=2", "+optimizer.lr=3e-4"));
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_EQ(spec.device(), v1::DEVICE_CPU);
  EXPECT_EQ(spec.run_name(), "mine");
  EXPECT_EQ(spec.labels().at("x"), "y=z");
  EXPECT_EQ(spec.priority(), 70);
  EXPECT_EQ(spec.max_restarts(), -1);
  EXPECT_EQ(spec.wall_time_limit_seconds(), 7200);
  EXPECT_EQ(spec.start().mode(), v1::START_MODE_FRESH);
  EXPECT_EQ(request_.request_id().size(), 36u);
  EXPECT_FALSE(request_.validate_only());
}

TEST_F(Mbctl, SubmitOutputs) {
  AcceptJobs();
  fake_.Start();
  EXPECT_EQ(Run({"submit", "-r", "x", "-o", "name"}).out, "j-abc\n");
  EXPECT_EQ(Run({"-o", "name", "submit", "-r", "x"}).out, "j-abc\n");
  const auto json = nlohmann::json::parse(Run({"submit", "-r", "x", "-o", "json"}).out);
  EXPECT_EQ(json["jobId"], "j-abc");
  EXPECT_EQ(Run({"submit", "-r", "x", "-q"}).err, "");
}

TEST_F(Mbctl, SubmitStartsExplicitly) {
  AcceptJobs();
  fake_.Start();
  ASSERT_EQ(Run({"submit", "-r", "x", "--start", "fork", "--from", "base@5", "--weights-only"}).code, 0);
  EXPECT_EQ(request_.spec().start().mode(), v1::START_MODE_FORK);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "base@5");
  EXPECT_TRUE(request_.spec().start().weights_only());
  EXPECT_EQ(Run({"submit", "-r", "x", "--from", "base@5"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "fork"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "resume", "--weights-only"}).code, 2);
  EXPECT_EQ(Run({"submit", "-r", "x", "--start", "again"}).code, 2);
}

TEST_F(Mbctl, RefusalShowsEachFieldReasonAndNextStep) {
  fake_.jobs.create = [](const auto&, auto*) {
    return ToGrpc(InvalidFields(v1::REASON_UNKNOWN_KEY, {{"model.hiden_size", "unknown key; did you mean model.hidden_size?"},
                                                         {"train.iters", "unknown key"}}));
  };
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "model.hiden_size=1", "train.iters=2"});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 errors"), HasSubstr("\n  model.hiden_size: unknown key; did you mean"),
                                HasSubstr("\n  train.iters: unknown key\n"), HasSubstr("reason: UNKNOWN_KEY"),
                                HasSubstr("next: The key does not exist; `mbctl recipe keys PATTERN`")));
}

TEST_F(Mbctl, EveryRefusalExitsWithItsReasonsCode) {
  fake_.Start();
  const auto* reasons = v1::Reason_descriptor();
  for (int i = 0; i < reasons->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(reasons->value(i)->number());
    const int code = InfoOf(reason).exit_code();
    // SERVICE_STOPPING comes with UNAVAILABLE, which is repeated; its code is tested in client/lib.
    if (code == 0 || reason == v1::REASON_SERVICE_STOPPING) continue;
    fake_.jobs.create = [reason](const auto&, auto*) {
      return ToGrpc(MakeStatus(absl::StatusCode::kFailedPrecondition, reason, "refused"));
    };
    const Result result = Run({"submit", "-r", "x"});
    EXPECT_EQ(result.code, code) << ReasonName(reason);
    EXPECT_THAT(result.err, HasSubstr("reason: " + ReasonName(reason)));
  }
}

TEST_F(Mbctl, NoCoordinatorSaysWhereAndHowToStartOne) {
  const Result result = Run({"ps"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, AllOf(HasSubstr(fake_.address()), HasSubstr("mbcoordinator --state-dir")));
}

TEST_F(Mbctl, UnreachableSubmitNamesTheRequestId) {
  const Result result = Run({"submit", "-r", "x", "--request-id", "11111111-2222-4333-8444-555555555555"});
  EXPECT_EQ(result.code, 7);
  EXPECT_THAT(result.err, HasSubstr("--request-id 11111111-2222-4333-8444-555555555555"));
}

TEST_F(Mbctl, ConfigFileOfFiveMegabytes) {
  const std::string path = ::testing::TempDir() + "big.yaml";
  std::ofstream(path) << std::string(5 << 20, '#');
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--config", path});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("REQUEST_TOO_LARGE"), HasSubstr("4 MiB")));
  std::remove(path.c_str());
  EXPECT_EQ(Run({"submit", "-r", "x", "--config", "/no/such.yaml"}).code, 2);
}

TEST_F(Mbctl, DryRunPrintsOriginsChangesAndMemory) {
  fake_.jobs.create = [](const v1::CreateJobRequest& request, v1::CreateJobResponse* response) {
    EXPECT_TRUE(request.validate_only());
    auto* resolved = response->mutable_job()->mutable_resolved();
    resolved->set_recipe("vanilla_gpt_pretrain_config");
    resolved->set_ranks(2);
    const std::tuple<const char*, const char*, v1::Origin> values[] = {
        {"model.hidden_size", "32", v1::ORIGIN_OVERRIDE}, {"model.kv_channels", "16", v1::ORIGIN_DERIVED},
        {"optimizer.adam_beta2", "0.95", v1::ORIGIN_RECIPE}, {"optimizer.adam_eps", "1e-08", v1::ORIGIN_DEFAULT},
        {"train.train_iters", "10", v1::ORIGIN_OVERRIDE}, {"train.global_batch_size", "32", v1::ORIGIN_OVERRIDE},
        {"dataset.seq_length", "512", v1::ORIGIN_OVERRIDE}};
    for (const auto& [key, value, origin] : values) {
      auto* entry = resolved->add_values();
      entry->set_key(key);
      entry->set_value(value);
      entry->set_origin(origin);
    }
    auto* change = resolved->add_changes();
    change->set_key("model.seq_length");
    change->set_old_value("1024");
    change->set_new_value("512");
    change->set_why("dataset.seq_length was set");
    resolved->mutable_per_rank()->set_optimizer_bytes(3 << 20);
    return grpc::Status::OK;
  };
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--dry-run"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, ::testing::ContainsRegex("model.hidden_size +32 +override"));
  EXPECT_THAT(result.out, ::testing::ContainsRegex("optimizer.adam_beta2 +0.95 +recipe"));
  EXPECT_THAT(result.out, AllOf(HasSubstr("model.seq_length: 1024 -> 512 (dataset.seq_length was set)"), HasSubstr("weights"),
                                HasSubstr("gradients"), HasSubstr("activations"), HasSubstr("parameters"),
                                HasSubstr("10 x 32 samples x 512 tokens"), Not(HasSubstr("adam_eps"))));
  EXPECT_THAT(result.out, ::testing::ContainsRegex("optimizer +3.0 MiB"));
  EXPECT_THAT(Run({"submit", "-r", "x", "--dry-run", "--all"}).out, HasSubstr("adam_eps"));
  EXPECT_EQ(nlohmann::json::parse(Run({"submit", "-r", "x", "--dry-run", "-o", "json"}).out)["ranks"], 2);
}

TEST_F(Mbctl, LocalDryRunCanBeFedBack) {
  const std::vector<std::string> line = {"submit", "-r", "vanilla_gpt_pretrain_config", "--dry-run", "--local",
                                         "model.num_layers=2", "train.train_iters=10", "scheduler.lr_decay_iters=10",
                                         "scheduler.lr_warmup_iters=1", "dataset.split='98,1,1'"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = line;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Result yaml = Run(with({"-o", "yaml"}));
  ASSERT_EQ(yaml.code, 0) << yaml.err;
  const std::string path = ::testing::TempDir() + "resolved.yaml";
  std::ofstream(path) << yaml.out;
  const Result first = Run(with({"-o", "json"}));
  const Result again = Run({"submit", "-r", "vanilla_gpt_pretrain_config", "--config", path, "--dry-run", "--local", "-o", "json"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(nlohmann::json::parse(first.out)["configHash"], nlohmann::json::parse(again.out)["configHash"]);
  std::remove(path.c_str());
}

// --- follow, wait -----------------------------------------------------------------------------------------------------

TEST_F(Mbctl, FollowPrintsMegatronLinesOnStdoutOnly) {
  AcceptJobs();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const Result result = Run({"submit", "-r", "x", "--follow"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("] iteration        1/       2 | consumed samples:"), HasSubstr("lm loss: 1.042070E+01"),
                                HasSubstr("lm loss: NaN"), HasSubstr(" validation loss at iteration 2 | lm loss value: 9.500000E+00"),
                                Not(HasSubstr("\x1b")), Not(HasSubstr("queued"))));
  EXPECT_EQ(result.out[0], ' ');
  EXPECT_THAT(result.err, AllOf(HasSubstr("queued, WAITING_FOR_SLOTS: needs 4 slots"), HasSubstr("running"),
                                HasSubstr("succeeded, COMPLETED"), Not(HasSubstr("\x1b"))));
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
  const Result result = Run({"wait", "j-abc", "--timeout", "0.2"}, [](auto* options) {
    options->silence_limit = options->lost_after = std::chrono::seconds(20);
  });
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
  Result RunAndInterrupt(std::vector<std::string> arguments) {
    std::jthread user([this] {
      while (!watching_) std::this_thread::sleep_for(milliseconds(5));
      std::this_thread::sleep_for(milliseconds(50));
      kill(getpid(), SIGINT);
    });
    return Run(std::move(arguments), [](auto* options) { options->silence_limit = options->lost_after = std::chrono::seconds(20); });
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

// --- jobs, resume, fork -----------------------------------------------------------------------------------------------

TEST_F(Mbctl, ResumeTakesTheSpecAndReplacesOverrides) {
  AcceptJobs();
  KnowJob();
  fake_.Start();
  ASSERT_EQ(Run({"resume", "run-1", "--from", "run-1@5", "train.train_iters=20"}).code, 0);
  const v1::JobSpec& spec = request_.spec();
  EXPECT_EQ(spec.run_name(), "run-1");
  EXPECT_EQ(spec.start().mode(), v1::START_MODE_RESUME);
  EXPECT_EQ(spec.start().checkpoint_id(), "run-1@5");
  EXPECT_EQ(spec.ranks(), 2);
  EXPECT_THAT(spec.overrides(), ElementsAre("optimizer.lr=3e-4", "train.train_iters=20"));
}

TEST_F(Mbctl, ForkFindsTheCheckpointOfAStep) {
  AcceptJobs();
  KnowJob();
  fake_.checkpoints.list = [](const v1::ListCheckpointsRequest& request, v1::ListCheckpointsResponse* response) {
    EXPECT_EQ(request.run_name(), "run-1");
    for (int step : {5, 10, 15}) {
      auto* checkpoint = response->add_checkpoints();
      checkpoint->set_checkpoint_id("run-1@" + std::to_string(step));
      checkpoint->set_step(step);
      checkpoint->set_job_id("j-abc");
      checkpoint->set_state(step == 15 ? v1::CHECKPOINT_STATE_CORRUPT : v1::CHECKPOINT_STATE_COMMITTED);
    }
    return grpc::Status::OK;
  };
  fake_.checkpoints.get = [](const v1::GetCheckpointRequest& request, v1::GetCheckpointResponse* response) {
    if (request.checkpoint_id() != "run-1@5") {
      return ToGrpc(MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND, "no checkpoint " + request.checkpoint_id()));
    }
    response->mutable_checkpoint()->set_checkpoint_id("run-1@5");
    response->mutable_checkpoint()->set_job_id("j-abc");
    return grpc::Status::OK;
  };
  fake_.Start();
  ASSERT_EQ(Run({"fork", "j-abc@10", "optimizer.lr=1e-4", "--name", "child"}).code, 0);
  EXPECT_EQ(request_.spec().start().mode(), v1::START_MODE_FORK);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@10");
  EXPECT_EQ(request_.spec().run_name(), "child");
  EXPECT_THAT(request_.spec().overrides(), ElementsAre("train.train_iters=10", "optimizer.lr=1e-4"));
  ASSERT_EQ(Run({"fork", "run-1@5"}).code, 0);
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@5");
  EXPECT_EQ(request_.spec().run_name(), "");
  ASSERT_EQ(Run({"fork", "j-abc"}).code, 0);  // The corrupt one is never the newest.
  EXPECT_EQ(request_.spec().start().checkpoint_id(), "run-1@10");
  const Result missing = Run({"fork", "j-abc@7"});
  EXPECT_EQ(missing.code, 3);
  EXPECT_THAT(missing.err, HasSubstr("run-1@5, run-1@10"));
  EXPECT_EQ(Run({"fork", "nobody@7"}).code, 3);
}

TEST_F(Mbctl, UnknownJobIsThreeEverywhere) {
  KnowJob();
  fake_.Start();
  for (const char* verb : {"get", "describe", "logs", "metrics", "cancel", "follow", "wait", "resume"}) {
    const Result result = Run({verb, "j-000"});
    EXPECT_EQ(result.code, 3) << verb;
    EXPECT_THAT(result.err, AllOf(HasSubstr("j-000"), HasSubstr("mbctl ps -a"))) << verb;
  }
}

TEST_F(Mbctl, PsGetDescribe) {
  KnowJob();
  fake_.Start();
  EXPECT_THAT(Run({"ps"}).out, AllOf(HasSubstr("JOB"), HasSubstr("j-abc")));
  EXPECT_EQ(Run({"ps", "-o", "name"}).out, "j-abc\n");
  EXPECT_THAT(Run({"describe", "run-1"}).out, AllOf(HasSubstr("COMPLETED"), HasSubstr("train.train_iters=10"), HasSubstr("attempt 1")));
  EXPECT_EQ(nlohmann::json::parse(Run({"get", "j-abc", "-o", "json"}).out)["runName"], "run-1");
  EXPECT_THAT(Run({"get", "j-abc", "-o", "yaml"}).out, HasSubstr("runName: run-1\n"));
}

TEST_F(Mbctl, MetricsTableJsonAndPlot) {
  KnowJob();
  TrainAndEnd(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED);
  fake_.Start();
  const Result table = Run({"metrics", "j-abc"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("LM LOSS"), HasSubstr("10.420700"), HasSubstr("NaN"), HasSubstr("validation")));
  std::istringstream lines(Run({"metrics", "j-abc", "-o", "json"}).out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_TRUE(nlohmann::json::parse(line).contains("lmLoss"));
  EXPECT_EQ(count, 3);
  EXPECT_THAT(Run({"metrics", "j-abc", "--plot"}).out, AllOf(HasSubstr("loss of j-abc"), HasSubstr("*")));
  const Result follow = Run({"metrics", "j-abc", "-f"});
  EXPECT_EQ(follow.code, 0);
  EXPECT_THAT(follow.out, HasSubstr("10.420700"));
}

TEST_F(Mbctl, LogsAreTheBytesOfTheRank) {
  KnowJob();
  fake_.jobs.logs = [](grpc::ServerContext*, const v1::TailLogsRequest& request, auto* writer) {
    EXPECT_EQ(request.rank(), 3);
    v1::TailLogsResponse message;
    message.set_data("line\n");
    message.set_attempt(1);
    if (request.follow()) *message.mutable_end() = End(v1::JOB_STATE_FAILED, v1::REASON_RANK_CRASHED);
    writer->Write(message);
    return grpc::Status::OK;
  };
  fake_.Start();
  const Result result = Run({"logs", "j-abc", "--rank", "3"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "line\n");
  EXPECT_EQ(Run({"logs", "-f", "j-abc", "--rank", "3"}).code, 1);
}

TEST_F(Mbctl, DamageFoundByVerifyIsNine) {
  fake_.checkpoints.verify = [](const auto&, auto*) {
    return ToGrpc(MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT, "shard-0.bin: checksum differs"));
  };
  fake_.Start();
  const Result result = Run({"ckpt", "verify", "run-1@5"});
  EXPECT_EQ(result.code, 9);
  EXPECT_THAT(result.err, HasSubstr("shard-0.bin"));
  const Result removed = Run({"ckpt", "rm", "run-1@5"});  // No terminal to ask on.
  EXPECT_EQ(removed.code, 2);
  EXPECT_THAT(removed.err, HasSubstr("--yes"));
}

// --- compare, translate, recipes --------------------------------------------------------------------------------------

TEST_F(Mbctl, CompareWithTheOracle) {
  const std::string oracle = std::string(MB_SOURCE_DIR) + "/tests/data/mlm/losses.json";
  const Result same = Run({"compare", oracle + ":seed1_default_dropout", oracle + ":seed1_default_dropout"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, AllOf(HasSubstr("ITERATION"), HasSubstr("10.420714"), HasSubstr("verdict: equal (10 iterations")));
  const Result other = Run({"compare", oracle + ":seed1", oracle + ":seed1_default_dropout", "-o", "json"});
  EXPECT_EQ(other.code, 1);
  EXPECT_EQ(nlohmann::json::parse(other.out)["verdict"], "DIFFERENT");
  EXPECT_EQ(Run({"compare", oracle + ":seed1", oracle + ":seed1_default_dropout", "--tolerance", "1", "--grad-norm-tolerance", "1"}).code, 0);
  const Result unknown = Run({"compare", oracle, oracle + ":seed1"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("seed1_dp2"));
  EXPECT_EQ(Run({"compare", "no/such.log", oracle + ":seed1"}).code, 3);
}

TEST_F(Mbctl, TranslateBothWays) {
  const Result forth = Run({"translate", "--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "512",
                            "--max-position-embeddings", "512", "--micro-batch-size", "4", "--global-batch-size", "32", "--train-iters",
                            "10", "--lr", "3e-4", "--bf16", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000"});
  ASSERT_EQ(forth.code, 0) << forth.err;
  EXPECT_THAT(forth.out, AllOf(HasSubstr("mbctl submit --recipe"), HasSubstr("model.num_layers=2")));
  const Result unknown = Run({"translate", "--num-layerz", "2"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("--num-layers"));
  const Result back = Run({"translate", "--reverse", "--recipe", "vanilla_gpt_pretrain_config", "model.num_layers=3"});
  ASSERT_EQ(back.code, 0) << back.err;
  EXPECT_THAT(back.out, HasSubstr("--num-layers 3"));
  EXPECT_EQ(Run({"translate"}).code, 2);
}

TEST_F(Mbctl, RecipeKeysAndLocalRecipes) {
  const Result keys = Run({"recipe", "keys", "hidden_size"});
  EXPECT_EQ(keys.code, 0);
  EXPECT_THAT(keys.out, HasSubstr("model.hidden_size"));
  EXPECT_EQ(Run({"recipe", "keys", "zzz-no-such"}).code, 3);
  EXPECT_THAT(Run({"recipe", "ls", "--local", "-o", "name"}).out, HasSubstr("vanilla_gpt_pretrain_config\n"));
  const Result show = Run({"recipe", "show", "--local", "vanilla_gpt_pretrain_config", "model.num_layers=2"});
  EXPECT_EQ(show.code, 0) << show.err;
  EXPECT_THAT(show.out, ::testing::ContainsRegex("model.num_layers +2 +override"));
  EXPECT_EQ(Run({"recipe", "show", "--local", "vanila_gpt_pretrain_config"}).code, 2);
}

// --- usage, help, completion ------------------------------------------------------------------------------------------

TEST_F(Mbctl, WrongUsageIsTwo) {
  for (const std::vector<std::string>& line :
       {std::vector<std::string>{}, {"frobnicate"}, {"submit"}, {"submit", "--no-such-option"}, {"get"}, {"ckpt"},
        {"submit", "-r", "x", "--priority", "101"}, {"submit", "-r", "x", "--device", "tpu"}, {"ps", "-o", "xml"},
        {"submit", "-r", "x", "--follow", "--wait"}, {"submit", "-r", "x", "--label", "novalue"}, {"help", "nothing"}}) {
    EXPECT_EQ(Run(line).code, 2) << ::testing::PrintToString(line);
  }
  EXPECT_THAT(Run({"ckpt", "frob"}).err, HasSubstr("next: mbctl ckpt --help"));
}

TEST_F(Mbctl, HelpAndVersionAreZeroAndOnStdout) {
  for (const std::vector<std::string>& line :
       {std::vector<std::string>{"--help"}, {"submit", "--help"}, {"ckpt", "ls", "--help"}, {"--version"}, {"version"}, {"help"},
        {"help", "submit"}, {"help", "ckpt", "ls"}, {"help", "exit-codes"}, {"help", "errors"}, {"help", "errors", "nan-loss"}}) {
    const Result result = Run(line);
    EXPECT_EQ(result.code, 0) << ::testing::PrintToString(line) << result.err;
    EXPECT_NE(result.out, "") << ::testing::PrintToString(line);
  }
  EXPECT_THAT(Run({"help", "errors", "REASON_NAN_LOSS"}).out, AllOf(HasSubstr("optimizer.lr"), HasSubstr("exit code 1")));
  EXPECT_EQ(Run({"help", "errors", "NAN_LOS"}).code, 3);
  EXPECT_THAT(Run({"help", "errors", "NAN_LOS"}).err, HasSubstr("NAN_LOSS"));
}

TEST(Manual, HasTheExitCodesOfTheSchema) {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/docs/mbctl.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(ExitCodesMarkdown())) << "docs/mbctl.md must contain this table:\n" << ExitCodesMarkdown();
}

TEST(Manual, NamesEveryCommand) {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/docs/mbctl.md");
  std::stringstream text;
  text << file.rdbuf();
  std::ostringstream out, err;
  Session session(out, err, Terminal(), [](const std::string&) { return std::nullopt; });
  const auto app = MakeApp(&session);
  for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
    EXPECT_THAT(text.str(), HasSubstr("`" + command->get_name())) << command->get_name();
  }
}

class Completion : public ::testing::Test {
 protected:
  void SetUp() override { app_ = MakeApp(&session_); }
  // Runs bash on text; its exit code and output.
  static std::pair<int, std::string> Bash(const std::string& flags, const std::string& text) {
    const std::string path = ::testing::TempDir() + "completion.bash";
    std::ofstream(path) << text;
    FILE* pipe = popen(("bash " + flags + " " + path + " 2>&1").c_str(), "r");
    std::string output;
    char buffer[4096];
    while (size_t n = fread(buffer, 1, sizeof(buffer), pipe)) output.append(buffer, n);
    const int status = pclose(pipe);
    std::remove(path.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
  }
  std::ostringstream out_, err_;
  Session session_{out_, err_, Terminal(), [](const std::string&) { return std::nullopt; }};
  std::unique_ptr<CLI::App> app_;
};

TEST_F(Completion, BashScriptIsValid) {
  const auto [code, output] = Bash("-n", BashCompletion(*app_));
  EXPECT_EQ(code, 0) << output;
}

TEST_F(Completion, BashScriptCompletes) {
  const auto complete = [&](const std::string& words, int index) {
    return Bash("", BashCompletion(*app_) + "\nmbctl() { :; }\ncompopt() { :; }\nCOMP_WORDS=(" + words + ")\nCOMP_CWORD=" +
                        std::to_string(index) + "\n_mbctl\necho \"${COMPREPLY[@]}\"\n").second;
  };
  EXPECT_EQ(complete("mbctl sub", 1), "submit\n");
  EXPECT_EQ(complete("mbctl ckpt ver", 2), "verify\n");
  EXPECT_EQ(complete("mbctl submit --fol", 2), "--follow\n");
  EXPECT_EQ(complete("mbctl submit --start re", 3), "resume\n");
}

TEST_F(Completion, ZshAndFishNameEveryCommand) {
  const std::string zsh = ZshCompletion(*app_), fish = FishCompletion(*app_);
  EXPECT_THAT(zsh, HasSubstr("#compdef mbctl"));
  for (const char* command : {"submit", "compare", "completion"}) EXPECT_THAT(fish, HasSubstr(std::string(" -a ") + command + " "));
  EXPECT_THAT(fish, HasSubstr("-l follow"));
}

TEST(MergeOverrides, LaterLinesReplaceTheSameKey) {
  EXPECT_THAT(MergeOverrides({"a.b=1", "+c=2", "d=3"}, {"c=5", "++a.b=7"}), ElementsAre("d=3", "c=5", "++a.b=7"));
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
