// Whole command lines against a fake coordinator: what is printed where, and the exit code.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "client/lib/testing/fake_coordinator.h"
#include "client/mbctl/app.h"
#include "client/mbctl/session.h"

namespace mbridge::mbctl {

using client::testing::FakeCoordinator;
using client::testing::ToGrpc;

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

}  // namespace mbridge::mbctl
