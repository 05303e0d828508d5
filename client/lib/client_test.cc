#include "client/lib/client.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "client/lib/backoff.h"
#include "client/lib/exit_code.h"
#include "client/lib/grpc_status.h"
#include "client/lib/testing/fake_coordinator.h"

namespace mbridge::client {
namespace {

using std::chrono::milliseconds;
using testing::FakeCoordinator;
using testing::ToGrpc;

std::unique_ptr<Client> ConnectTo(const ConnectionOptions& options) {
  auto client = Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return std::move(*client);
}

v1::WatchJobResponse Event(int64_t sequence, v1::JobState state) {
  v1::WatchJobResponse message;
  message.mutable_event()->set_sequence(sequence);
  message.mutable_event()->set_kind(v1::EVENT_KIND_STATE);
  message.mutable_event()->set_state(state);
  return message;
}

v1::WatchJobResponse End(v1::JobState state, v1::Reason reason) {
  v1::WatchJobResponse message;
  message.mutable_end()->set_state(state);
  message.mutable_end()->set_reason(reason);
  message.mutable_end()->set_exit_code(InfoOf(reason).exit_code());
  return message;
}

v1::StreamMetricsResponse Points(std::initializer_list<int> steps, const std::string& token) {
  v1::StreamMetricsResponse message;
  for (int step : steps) {
    auto* point = message.add_points();
    point->set_kind(v1::METRIC_KIND_TRAIN);
    point->set_attempt(1);
    point->set_step(step);
  }
  message.set_resume_token(token);
  return message;
}

TEST(RequestId, IsAVersion4UuidAndFresh) {
  const std::string id = MakeRequestId();
  ASSERT_EQ(id.size(), 36u);
  EXPECT_EQ(id[8], '-');
  EXPECT_EQ(id[14], '4');
  EXPECT_NE(std::string("89ab").find(id[19]), std::string::npos);
  EXPECT_NE(id, MakeRequestId());
}

TEST(Backoff, GrowsToItsBoundAndJitters) {
  Backoff backoff(milliseconds(100), milliseconds(1000), 7);
  std::set<int64_t> waits;
  for (int i = 0; i < 20; ++i) {
    const auto wait = backoff.Next().count();
    EXPECT_LE(wait, 1000);
    EXPECT_GE(wait, i > 8 ? 500 : 50);
    waits.insert(wait);
  }
  EXPECT_GT(waits.size(), 10u);
  backoff.Reset();
  EXPECT_LE(backoff.Next().count(), 100);
}

TEST(UnaryCalls, KeepReasonAndFieldViolations) {
  FakeCoordinator fake;
  fake.jobs.create = [](const auto&, auto*) {
    return ToGrpc(InvalidFields(v1::REASON_UNKNOWN_KEY, {{"model.hiden_size", "did you mean model.hidden_size?"}}));
  };
  fake.Start();
  const auto client = ConnectTo(fake.Options());
  const auto created = client->CreateJob({});
  ASSERT_FALSE(created.ok());
  EXPECT_EQ(ReasonOf(created.status()), v1::REASON_UNKNOWN_KEY);
  const auto violations = FieldViolationsOf(created.status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "model.hiden_size");
  EXPECT_EQ(ExitCodeOf(created.status()), kExitInvalid);
}

TEST(UnaryCalls, RepeatCreateJobWithTheSameRequestId) {
  FakeCoordinator fake;
  std::vector<std::string> ids;
  fake.jobs.create = [&](const v1::CreateJobRequest& request, v1::CreateJobResponse* response) {
    ids.push_back(request.request_id());
    if (ids.size() < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "restarting");
    response->mutable_job()->set_job_id("j-1");
    return grpc::Status::OK;
  };
  fake.Start();
  const auto created = ConnectTo(fake.Options())->CreateJob({});
  ASSERT_TRUE(created.ok()) << created.status();
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids[0].size(), 36u);
  EXPECT_EQ(ids[0], ids[2]);
}

TEST(UnaryCalls, DoNotRepeatAnswers) {
  FakeCoordinator fake;
  int calls = 0;
  fake.jobs.get = [&](const auto&, auto*) {
    ++calls;
    return ToGrpc(MakeStatus(absl::StatusCode::kNotFound, v1::REASON_JOB_NOT_FOUND, "no job j-x"));
  };
  fake.Start();
  const auto job = ConnectTo(fake.Options())->GetJob("j-x");
  EXPECT_EQ(ExitCodeOf(job.status()), kExitNotFound);
  EXPECT_EQ(calls, 1);
}

TEST(UnaryCalls, SayWhereNobodyAnswers) {
  FakeCoordinator fake;  // Never started.
  const auto job = ConnectTo(fake.Options())->GetJob("j-x");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(job.status().message()).find(fake.address()), std::string::npos) << job.status();
  EXPECT_EQ(ExitCodeOf(job.status()), kExitConnectionLost);
}

// Stands before a coordinator that takes `delay` to answer a new connection.
class SlowDoor {
 public:
  SlowDoor(std::string to, milliseconds delay) : to_(std::move(to)), delay_(delay) {
    listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un name = Name(path_);
    unlink(path_.c_str());
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    thread_ = std::thread([this] { Serve(); });
  }
  ~SlowDoor() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
    unlink(path_.c_str());
  }
  std::string address() const { return "unix:" + path_; }

 private:
  static sockaddr_un Name(const std::string& path) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    path.copy(name.sun_path, sizeof(name.sun_path) - 1);
    return name;
  }
  // One connection after the other.
  void Serve() {
    for (int client = accept(listener_, nullptr, nullptr); client >= 0; client = accept(listener_, nullptr, nullptr)) {
      std::this_thread::sleep_for(delay_);
      const int server = socket(AF_UNIX, SOCK_STREAM, 0);
      const sockaddr_un name = Name(to_);
      if (connect(server, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0) Relay(client, server);
      close(server);
      close(client);
    }
  }
  static void Relay(int a, int b) {
    pollfd ends[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
    char buffer[4096];
    while (poll(ends, 2, 10'000) > 0) {
      for (int i = 0; i < 2; ++i) {
        if (ends[i].revents == 0) continue;
        const ssize_t got = read(ends[i].fd, buffer, sizeof(buffer));
        if (got <= 0 || send(ends[1 - i].fd, buffer, static_cast<size_t>(got), MSG_NOSIGNAL) != got) return;
      }
    }
  }

  const std::string path_ = "/tmp/mb-door-" + std::to_string(getpid()) + ".sock";
  const std::string to_;
  const milliseconds delay_;
  int listener_ = -1;
  std::thread thread_;
};

// A busy coordinator or a far one: the attempt must not be cut and begun again for ever.
TEST(UnaryCalls, WaitForASlowHandshake) {
  FakeCoordinator fake;
  fake.jobs.get = [](const auto&, v1::GetJobResponse* response) {
    response->mutable_job()->set_job_id("j-x");
    return grpc::Status::OK;
  };
  fake.Start();
  SlowDoor door(fake.address().substr(5), milliseconds(1500));
  auto options = fake.Options();
  options.server = door.address();
  const auto job = ConnectTo(options)->GetJob("j-x");
  EXPECT_TRUE(job.ok()) << job.status();
}

TEST(UnaryCalls, HaveADeadline) {
  FakeCoordinator fake;
  fake.jobs.get = [](const auto&, auto*) {
    std::this_thread::sleep_for(milliseconds(400));
    return grpc::Status::OK;
  };
  fake.Start();
  auto options = fake.Options();
  options.call_deadline = milliseconds(100);
  const auto job = ConnectTo(options)->GetJob("j-x");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kDeadlineExceeded) << job.status();
  EXPECT_EQ(ExitCodeOf(job.status()), kExitConnectionLost);
}

TEST(UnaryCalls, RefuseTooLargeRequestsBeforeSending) {
  FakeCoordinator fake;
  v1::CreateJobRequest request;
  request.mutable_spec()->set_config_yaml(std::string(5 << 20, 'x'));
  const auto created = ConnectTo(fake.Options())->CreateJob(request);
  EXPECT_EQ(ReasonOf(created.status()), v1::REASON_REQUEST_TOO_LARGE);
}

TEST(GrpcStatus, RecognisesTheServersSizeLimit) {
  const absl::Status status =
      FromGrpc({grpc::StatusCode::RESOURCE_EXHAUSTED, "Received message larger than max (5242880 vs. 4194304)"});
  EXPECT_EQ(ReasonOf(status), v1::REASON_REQUEST_TOO_LARGE);
  EXPECT_EQ(FromGrpc({grpc::StatusCode::DATA_LOSS, "x", "not a message \xff"}).code(), absl::StatusCode::kDataLoss);
}

TEST(Lists, GoThroughAllPages) {
  FakeCoordinator fake;
  fake.jobs.list = [](const v1::ListJobsRequest& request, v1::ListJobsResponse* response) {
    const int page = request.page_token().empty() ? 0 : std::stoi(request.page_token());
    for (int i = 0; i < 2; ++i) response->add_jobs()->set_job_id("j-" + std::to_string(2 * page + i));
    if (page < 2) response->set_next_page_token(std::to_string(page + 1));
    return grpc::Status::OK;
  };
  fake.Start();
  const auto jobs = ConnectTo(fake.Options())->ListJobs("", 100);
  ASSERT_TRUE(jobs.ok()) << jobs.status();
  ASSERT_EQ(jobs->size(), 6u);
  EXPECT_EQ(jobs->back().job_id(), "j-5");
}

TEST(WatchJob, ResumesBySequenceWithoutGapOrRepeat) {
  FakeCoordinator fake;
  std::vector<int64_t> asked;
  fake.jobs.watch = [&](grpc::ServerContext*, const v1::WatchJobRequest& request, auto* writer) {
    asked.push_back(request.after_sequence());
    if (asked.size() == 1) {
      writer->Write(Event(1, v1::JOB_STATE_QUEUED));
      writer->Write(Event(2, v1::JOB_STATE_RUNNING));
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "stopping");
    }
    if (asked.size() == 2) return grpc::Status::OK;  // Without end: not believed.
    writer->Write(Event(2, v1::JOB_STATE_RUNNING));  // Sent again.
    writer->Write(Event(3, v1::JOB_STATE_SUCCEEDED));
    writer->Write(End(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED));
    return grpc::Status::OK;
  };
  fake.Start();
  std::vector<int64_t> seen;
  const auto end =
      ConnectTo(fake.Options())->WatchJob("j", 0, [&](const v1::JobEvent& event) { seen.push_back(event.sequence()); });
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(ExitCodeOf(*end), 0);
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(asked, (std::vector<int64_t>{0, 2, 2}));
}

TEST(WatchJob, SurvivesARestartOfTheCoordinator) {
  FakeCoordinator fake;
  std::atomic<int> streams{0};
  fake.jobs.watch = [&](grpc::ServerContext* context, const auto&, auto* writer) {
    if (++streams == 1) {
      writer->Write(Event(1, v1::JOB_STATE_RUNNING));
      while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
      return grpc::Status::CANCELLED;
    }
    writer->Write(End(v1::JOB_STATE_FAILED, v1::REASON_NAN_LOSS));
    return grpc::Status::OK;
  };
  fake.Start();
  auto options = fake.Options();
  options.lost_after = milliseconds(5000);
  const auto client = ConnectTo(options);
  std::jthread restart;
  const auto end = client->WatchJob("j", 0, [&](const v1::JobEvent&) {
    restart = std::jthread([&] {
      fake.Stop();
      std::this_thread::sleep_for(milliseconds(200));
      fake.Start();
    });
  });
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(ExitCodeOf(*end), kExitJobFailed);
}

TEST(WatchJob, LostForGoodIsStateUnknownAndNeverZero) {
  FakeCoordinator fake;
  fake.jobs.watch = [&](grpc::ServerContext* context, const auto&, auto* writer) {
    writer->Write(Event(1, v1::JOB_STATE_RUNNING));
    while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
    return grpc::Status::CANCELLED;
  };
  fake.Start();
  std::jthread stopper;
  int told = 0;
  auto options = fake.Options();
  options.on_retry = [&told](const std::string&) { ++told; };
  const auto end =
      ConnectTo(options)->WatchJob("j", 0, [&](const v1::JobEvent&) { stopper = std::jthread([&] { fake.Stop(); }); });
  ASSERT_FALSE(end.ok());
  EXPECT_NE(std::string(end.status().message()).find("connection lost, job state unknown"), std::string::npos);
  EXPECT_EQ(ExitCodeOf(end.status()), kExitConnectionLost);
  EXPECT_EQ(told, 1);
}

TEST(WatchJob, EndlessOkWithoutEndIsLostToo) {
  FakeCoordinator fake;
  fake.jobs.watch = [](grpc::ServerContext*, const auto&, auto* writer) {
    v1::WatchJobResponse heartbeat;
    heartbeat.set_heartbeat(true);
    writer->Write(heartbeat);
    return grpc::Status::OK;
  };
  fake.Start();
  const auto end = ConnectTo(fake.Options())->WatchJob("j", 0, [](const v1::JobEvent&) {});
  EXPECT_EQ(ExitCodeOf(end.status()), kExitConnectionLost);
}

TEST(WatchJob, SilentStreamIsBrokenAndTakenUpAgain) {
  FakeCoordinator fake;
  std::atomic<int> streams{0};
  fake.jobs.watch = [&](grpc::ServerContext* context, const auto&, auto* writer) {
    if (++streams == 1) {
      while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
      return grpc::Status::CANCELLED;
    }
    writer->Write(End(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED));
    return grpc::Status::OK;
  };
  fake.Start();
  auto options = fake.Options();
  options.silence_limit = milliseconds(150);
  const auto end = ConnectTo(options)->WatchJob("j", 0, [](const v1::JobEvent&) {});
  EXPECT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(streams, 2);
}

TEST(WatchJob, HeartbeatsKeepAQuietStreamAlive) {
  FakeCoordinator fake;
  std::atomic<int> streams{0};
  fake.jobs.watch = [&](grpc::ServerContext*, const auto&, auto* writer) {
    ++streams;
    v1::WatchJobResponse heartbeat;
    heartbeat.set_heartbeat(true);
    for (int i = 0; i < 8; ++i) {
      writer->Write(heartbeat);
      std::this_thread::sleep_for(milliseconds(100));
    }
    writer->Write(End(v1::JOB_STATE_SUCCEEDED, v1::REASON_COMPLETED));
    return grpc::Status::OK;
  };
  fake.Start();
  auto options = fake.Options();
  options.silence_limit = milliseconds(500);
  EXPECT_TRUE(ConnectTo(options)->WatchJob("j", 0, [](const v1::JobEvent&) {}).ok());
  EXPECT_EQ(streams, 1);
}

TEST(WatchJob, StopsWhenTold) {
  FakeCoordinator fake;
  std::stop_source stop;
  fake.jobs.watch = [&](grpc::ServerContext* context, const auto&, auto* writer) {
    writer->Write(Event(1, v1::JOB_STATE_RUNNING));
    while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
    return grpc::Status::CANCELLED;
  };
  fake.Start();
  std::jthread interrupt;
  const auto end =
      ConnectTo(fake.Options())
          ->WatchJob(
              "j", 0, [&](const v1::JobEvent&) { interrupt = std::jthread([&] { stop.request_stop(); }); }, stop.get_token());
  EXPECT_EQ(end.status().code(), absl::StatusCode::kCancelled);
}

TEST(FollowMetrics, ResumesByTokenAndLeavesOutRepeats) {
  FakeCoordinator fake;
  std::vector<std::string> tokens;
  fake.jobs.metrics = [&](grpc::ServerContext*, const v1::StreamMetricsRequest& request, auto* writer) {
    tokens.push_back(request.resume_token());
    if (tokens.size() == 1) {
      writer->Write(Points({1, 2}, "t2"));
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    if (request.resume_token() == "t2") {
      return ToGrpc(MakeStatus(absl::StatusCode::kOutOfRange, v1::REASON_RESUME_CONSUMED, "token is not held any more"));
    }
    v1::StreamMetricsResponse all = Points({1, 2, 3}, "t3");
    all.mutable_end()->set_state(v1::JOB_STATE_SUCCEEDED);
    writer->Write(all);
    return grpc::Status::OK;
  };
  fake.Start();
  std::vector<int64_t> steps;
  const auto end = ConnectTo(fake.Options())->FollowMetrics({.job_id = "j"}, [&](const v1::MetricPoint& point) {
    steps.push_back(point.step());
  });
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(tokens, (std::vector<std::string>{"", "t2", ""}));
}

TEST(ReadMetrics, HistoryNeedsNoEndMessage) {
  FakeCoordinator fake;
  fake.jobs.metrics = [&](grpc::ServerContext*, const v1::StreamMetricsRequest& request, auto* writer) {
    EXPECT_FALSE(request.follow());
    writer->Write(Points({1, 2}, "t"));
    return grpc::Status::OK;
  };
  fake.Start();
  const auto points = ConnectTo(fake.Options())->ReadMetrics({.job_id = "j"});
  ASSERT_TRUE(points.ok()) << points.status();
  EXPECT_EQ(points->size(), 2u);
}

TEST(FollowLog, ResumesByOffsetAndGoesOnWithTheNextAttempt) {
  FakeCoordinator fake;
  int streams = 0;
  fake.jobs.logs = [&](grpc::ServerContext*, const v1::TailLogsRequest& request, auto* writer) {
    v1::TailLogsResponse message;
    ++streams;
    if (streams == 1) {
      message.set_attempt(1);
      message.set_data("abc");
      writer->Write(message);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    if (streams == 2) {
      EXPECT_EQ(request.offset(), 3);
      EXPECT_EQ(request.attempt(), 1);
      message.set_attempt(1);
      message.set_offset(2);  // Overlaps by one byte.
      message.set_data("cde");
    } else {
      EXPECT_EQ(request.attempt(), 2);
      EXPECT_EQ(request.offset(), 0);
      message.set_attempt(2);
      message.set_data("xyz");
    }
    // The end of an attempt is not the end of the job.
    message.mutable_end()->set_state(streams == 2 ? v1::JOB_STATE_QUEUED : v1::JOB_STATE_SUCCEEDED);
    writer->Write(message);
    return grpc::Status::OK;
  };
  fake.jobs.get = [](const auto&, v1::GetJobResponse* response) {
    response->mutable_job()->add_attempts();
    response->mutable_job()->add_attempts();
    return grpc::Status::OK;
  };
  fake.Start();
  std::string text;
  const auto end = ConnectTo(fake.Options())->FollowLog({.job_id = "j"}, [&](const std::string& bytes, int) { text += bytes; });
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(text, "abcdexyz");
}

TEST(FollowLog, RefusalsEndIt) {
  FakeCoordinator fake;
  int streams = 0;
  fake.jobs.logs = [&](grpc::ServerContext*, const auto&, auto*) {
    ++streams;
    return ToGrpc(MakeStatus(absl::StatusCode::kNotFound, v1::REASON_JOB_NOT_FOUND, "no such job"));
  };
  fake.Start();
  const auto end = ConnectTo(fake.Options())->FollowLog({.job_id = "j"}, [](const std::string&, int) {});
  EXPECT_EQ(ExitCodeOf(end.status()), kExitNotFound);
  EXPECT_EQ(streams, 1);
}

}  // namespace
}  // namespace mbridge::client
