// The API over a real gRPC connection, with an agent that speaks Sync from a thread of the test.
#include "server/api/server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "mbridge/v1/admin_service.grpc.pb.h"
#include "mbridge/v1/agent_service.grpc.pb.h"
#include "mbridge/v1/checkpoint_service.grpc.pb.h"
#include "mbridge/v1/job_service.grpc.pb.h"
#include "mbridge/v1/node_service.grpc.pb.h"
#include "mbridge/v1/recipe_service.grpc.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// One recipe, "tiny"; an override "ranks=N" sets the ranks, "save=PATH" checkpoint.save, any other is an unknown key.
RecipeSource FakeRecipes() {
  v1::Recipe tiny;
  tiny.set_name("tiny");
  RecipeSource source;
  source.list = [tiny] { return std::vector<v1::Recipe>{tiny}; };
  source.find = [tiny](const std::string&) { return tiny; };
  source.resolve = [](const recipes::ResolveRequest& request) -> absl::StatusOr<v1::ResolvedConfig> {
    if (request.recipe == "untrainable" && request.require_trainable) {
      return MakeStatus(absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_MODEL, "no such part");
    }
    v1::ResolvedConfig resolved;
    resolved.set_recipe(request.recipe);
    resolved.set_ranks(std::max(1, request.ranks));
    for (const std::string& text : request.overrides) {
      if (text.starts_with("cache=")) {
        resolved.mutable_config()->mutable_dataset()->set_path_to_cache(text.substr(6));
        continue;
      }
      if (!text.starts_with("save=")) {
        return InvalidFields(v1::REASON_UNKNOWN_KEY, {{text.substr(0, text.find('=')), "does not exist"}});
      }
      resolved.mutable_config()->mutable_checkpoint()->set_save(text.substr(5));
    }
    return resolved;
  };
  return source;
}

v1::Reason ReasonOf(const grpc::Status& status) {
  google::rpc::Status rpc;
  rpc.ParseFromString(status.error_details());
  return mbridge::ReasonOf(FromRpcStatus(rpc));
}

// Runs every attempt for `steps` steps, one a Sync, then ends it. Answers preflights with `problems`.
class AgentThread {
 public:
  AgentThread(const std::shared_ptr<grpc::Channel>& channel, int64_t steps, std::vector<v1::Gpu> gpus = {})
      : stub_(v1::AgentService::NewStub(channel)), steps_(steps), gpus_(std::move(gpus)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~AgentThread() {
    stop_ = true;
    thread_.join();
  }
  std::vector<v1::PreflightProblem> problems;  // Set before the first submit.
  std::atomic<bool> ended{false};              // Got a ShutdownTask.
  v1::RankSpec LastPreflight() {
    std::lock_guard lock(mutex_);
    return last_preflight_;
  }

 private:
  struct Attempt {
    uint64_t acknowledged = 0, sequence = 0;
    bool done = false;
    int64_t log_offset = 0;
  };

  void Run() {
    v1::SyncRequest request;
    request.set_node_id("node-t");
    request.mutable_inventory()->set_cpu_cores(4);
    request.mutable_inventory()->set_hostname("testhost");
    for (const v1::Gpu& gpu : gpus_) *request.mutable_inventory()->add_gpus() = gpu;
    request.set_wait_ms(100);
    while (!stop_) {
      FillAttempts(&request);
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + seconds(10));
      v1::SyncResponse response;
      if (!stub_->Sync(&context, request, &response).ok()) {
        std::this_thread::sleep_for(milliseconds(20));
        continue;
      }
      request.set_seen_version(response.version());
      request.clear_results();
      for (const auto& order : response.orders()) Obey(order);
      for (const auto& task : response.tasks()) Answer(task, request.add_results());
    }
  }

  void FillAttempts(v1::SyncRequest* request) {
    request->clear_attempts();
    for (auto& [key, attempt] : attempts_) {
      v1::AttemptReport* report = request->add_attempts();
      report->set_job_id(key.first);
      report->set_attempt(key.second);
      report->set_phase(attempt.done ? v1::ATTEMPT_PHASE_ENDED : v1::ATTEMPT_PHASE_RUNNING);
      report->set_drained(attempt.done);
      if (attempt.done) {
        v1::RankEnd* end = report->add_rank_ends();
        end->set_reason(attempt.sequence > static_cast<uint64_t>(steps_) ? v1::REASON_COMPLETED : v1::REASON_CANCELLED_BY_USER);
        end->set_exit_code(end->reason() == v1::REASON_COMPLETED ? 0 : 1);
        continue;
      }
      if (attempt.sequence > static_cast<uint64_t>(steps_)) {
        attempt.done = attempt.acknowledged == attempt.sequence;
        continue;
      }
      attempt.sequence = attempt.acknowledged + 1;
      v1::RankRecord* record = report->add_records();
      record->set_sequence(attempt.sequence);
      if (attempt.sequence == 1) {
        record->mutable_started()->set_parameters(1);
      } else {
        record->mutable_metric()->set_kind(v1::METRIC_KIND_TRAIN);
        record->mutable_metric()->set_step(static_cast<int64_t>(attempt.sequence) - 1);
        record->mutable_metric()->set_lm_loss(attempt.sequence == 3 ? NAN : 10.0 / static_cast<double>(attempt.sequence));
      }
      v1::LogChunk* log = report->add_logs();
      log->set_offset(attempt.log_offset);
      log->set_data("line " + std::to_string(attempt.sequence) + "\n");
    }
  }

  void Obey(const v1::AttemptOrder& order) {
    const auto key = std::make_pair(order.job_id(), order.attempt());
    if (order.desired() == v1::DESIRED_STATE_RUN) attempts_.try_emplace(key);
    const auto found = attempts_.find(key);
    if (found == attempts_.end()) return;
    found->second.acknowledged = order.acknowledged_records();
    if (order.logs_size() > 0) found->second.log_offset = order.logs(0).offset();
    if (order.desired() == v1::DESIRED_STATE_STOP || order.desired() == v1::DESIRED_STATE_KILL) found->second.done = true;
    if (order.desired() == v1::DESIRED_STATE_FORGET) attempts_.erase(found);
  }

  void Answer(const v1::NodeTask& task, v1::TaskResult* result) {
    result->set_task_id(task.task_id());
    result->set_ok(true);
    if (task.has_shutdown()) ended = true;
    if (task.has_preflight()) {
      std::lock_guard lock(mutex_);
      last_preflight_ = task.preflight().spec();
    }
    for (const auto& problem : problems) *result->mutable_preflight()->add_problems() = problem;
  }

  std::unique_ptr<v1::AgentService::Stub> stub_;
  const int64_t steps_;
  const std::vector<v1::Gpu> gpus_;
  std::mutex mutex_;
  v1::RankSpec last_preflight_;
  std::map<std::pair<std::string, int32_t>, Attempt> attempts_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::temp_directory_path() / ("mb_api." + std::to_string(getpid()));
    std::filesystem::remove_all(directory_);
    StartServer();
  }
  void TearDown() override {
    agent_.reset();
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  ServerOptions Options() {
    ServerOptions options;
    options.state_directory = directory_;
    options.listen = {LocalAddress(directory_)};
    options.version = "0";
    options.build_id = "test";
    options.local_hostname = "testhost";
    options.stop_grace = milliseconds(500);
    options.preflight_timeout = milliseconds(2000);
    return options;
  }
  void StartServer() { StartServer(Options()); }
  void StartServer(ServerOptions options) {
    server_.reset();
    auto server = Server::Start(std::move(options), FakeRecipes());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(server).value();
    channel_ = grpc::CreateChannel(LocalAddress(directory_), grpc::InsecureChannelCredentials());
    jobs_ = v1::JobService::NewStub(channel_);
  }
  void StartAgent(int64_t steps, const std::vector<v1::Gpu>& gpus = {}) {
    agent_ = std::make_unique<AgentThread>(channel_, steps, gpus);
    for (int i = 0; i < 500 && server_->controller()->ListNodes().empty(); ++i) std::this_thread::sleep_for(milliseconds(10));
  }

  static v1::CreateJobRequest Request(const std::string& request_id = "", const std::string& run_name = "") {
    v1::CreateJobRequest request;
    request.mutable_spec()->set_recipe("tiny");
    request.mutable_spec()->set_run_name(run_name);
    request.set_request_id(request_id);
    return request;
  }
  grpc::Status Create(const v1::CreateJobRequest& request, v1::CreateJobResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    return jobs_->CreateJob(&context, request, response);
  }
  std::string MustCreate(const v1::CreateJobRequest& request) {
    v1::CreateJobResponse response;
    const grpc::Status status = Create(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.job().job_id();
  }
  // Reads until the stream ends, or until `enough`.
  struct Watched {
    std::vector<v1::JobEvent> events;
    std::optional<v1::StreamEnd> end;
    grpc::Status status;
    std::vector<int64_t> Sequences() const {
      std::vector<int64_t> sequences;
      for (const auto& event : events) {
        if (event.kind() != v1::EVENT_KIND_PROGRESS) sequences.push_back(event.sequence());
      }
      return sequences;
    }
  };
  Watched Watch(const std::string& job_id, int64_t after = 0, int stored_enough = 1 << 30) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(30));
    v1::WatchJobRequest request;
    request.set_job_id(job_id);
    request.set_after_sequence(after);
    auto reader = jobs_->WatchJob(&context, request);
    Watched watched;
    v1::WatchJobResponse response;
    while (static_cast<int>(watched.Sequences().size()) < stored_enough && reader->Read(&response)) {
      if (response.has_event()) watched.events.push_back(response.event());
      if (response.has_end()) watched.end = response.end();
    }
    if (static_cast<int>(watched.Sequences().size()) >= stored_enough) context.TryCancel();
    watched.status = reader->Finish();
    return watched;
  }

  std::string directory_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<AgentThread> agent_;
};

// One message each way of a call whose stubs Debian does not ship; the answer's bytes.
std::string CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  EXPECT_TRUE(wait()) << method;
  const grpc::Slice slice(request);
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  EXPECT_TRUE(wait()) << method;
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  EXPECT_TRUE(wait()) << method;
  grpc::Status status;
  call->Finish(&status, nullptr);
  EXPECT_TRUE(wait()) << method;
  EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (answer.Dump(&slices).ok()) {
    for (const grpc::Slice& each : slices) bytes.append(reinterpret_cast<const char*>(each.begin()), each.size());
  }
  return bytes;
}

TEST_F(ServerTest, HealthAndReflectionAnswer) {
  // HealthCheckRequest{service}, HealthCheckResponse{status: SERVING}; ServerReflectionRequest{list_services}.
  const std::string serving = "\x08\x01";
  EXPECT_EQ(CallRaw(channel_, "/grpc.health.v1.Health/Check", ""), serving);
  const std::string name = "mbridge.v1.JobService";
  EXPECT_EQ(CallRaw(channel_, "/grpc.health.v1.Health/Check", "\x0a" + std::string(1, static_cast<char>(name.size())) + name),
            serving);
  const std::string services =
      CallRaw(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", std::string("\x3a\x01*"));
  for (const char* service : {"mbridge.v1.JobService", "mbridge.v1.CheckpointService", "mbridge.v1.NodeService",
                              "mbridge.v1.RecipeService", "mbridge.v1.AdminService"}) {
    EXPECT_THAT(services, HasSubstr(service));
  }
}

TEST_F(ServerTest, AJobIsFollowedToItsEnd) {
  StartAgent(5);
  const std::string job = MustCreate(Request());
  const Watched watched = Watch(job);
  EXPECT_TRUE(watched.status.ok()) << watched.status.error_message();
  ASSERT_TRUE(watched.end.has_value());
  EXPECT_EQ(watched.end->state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(watched.end->exit_code(), 0);
  const auto sequences = watched.Sequences();
  for (size_t i = 0; i < sequences.size(); ++i) EXPECT_EQ(sequences[i], static_cast<int64_t>(i + 1));

  // Resumed after the second event: no gap, no repetition.
  const auto rest = Watch(job, 2).Sequences();
  ASSERT_FALSE(rest.empty());
  EXPECT_EQ(rest.front(), 3);
  EXPECT_EQ(rest.back(), sequences.back());

  grpc::ClientContext context;
  v1::StreamMetricsRequest metrics;
  metrics.set_job_id(job);
  metrics.set_follow(true);
  auto reader = jobs_->StreamMetrics(&context, metrics);
  std::vector<v1::MetricPoint> points;
  bool ended = false;
  for (v1::StreamMetricsResponse response; reader->Read(&response);) {
    points.insert(points.end(), response.points().begin(), response.points().end());
    ended = ended || response.has_end();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(ended);
  ASSERT_EQ(points.size(), 5u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(points[i].step(), i + 1);
  EXPECT_TRUE(std::isnan(points[1].lm_loss())) << "NaN stays NaN";

  grpc::ClientContext log_context;
  v1::TailLogsRequest logs;
  logs.set_job_id(job);
  logs.set_follow(true);
  auto log_reader = jobs_->TailLogs(&log_context, logs);
  std::string text;
  for (v1::TailLogsResponse response; log_reader->Read(&response);) text += response.data();
  EXPECT_TRUE(log_reader->Finish().ok());
  EXPECT_THAT(text, ::testing::StartsWith("line 1\nline 2\n"));
  EXPECT_THAT(text, HasSubstr("line 6\n"));
}

TEST_F(ServerTest, OneRequestIdMakesOneJob) {
  const v1::CreateJobRequest request = Request("r-1");
  std::vector<std::thread> clients;
  std::mutex mutex;
  std::map<std::string, int> jobs;
  int fresh = 0;
  for (int i = 0; i < 20; ++i) {
    clients.emplace_back([&] {
      v1::CreateJobResponse response;
      const grpc::Status status = Create(request, &response);
      std::lock_guard lock(mutex);
      EXPECT_TRUE(status.ok()) << status.error_message();
      ++jobs[response.job().job_id()];
      fresh += !response.already_existed();
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(jobs.size(), 1u);
  EXPECT_EQ(fresh, 1);
  v1::CreateJobResponse response;
  v1::CreateJobRequest other = request;
  other.mutable_spec()->set_priority(7);
  EXPECT_EQ(ReasonOf(Create(other, &response)), v1::REASON_REQUEST_ID_REUSED);
  server_.reset();
  StartServer();
  EXPECT_TRUE(Create(request, &response).ok());
  EXPECT_EQ(response.job().job_id(), jobs.begin()->first) << "after a restart too";
}

TEST_F(ServerTest, ValidateOnlyChecksAndStoresNothing) {
  v1::CreateJobRequest request = Request("r-1");
  request.set_validate_only(true);
  v1::CreateJobResponse response;
  EXPECT_TRUE(Create(request, &response).ok());
  EXPECT_EQ(response.job().resolved().recipe(), "tiny");
  EXPECT_FALSE(response.job().run_name().empty());
  request.mutable_spec()->add_overrides("nonsense=1");
  EXPECT_EQ(ReasonOf(Create(request, &response)), v1::REASON_UNKNOWN_KEY);
  EXPECT_TRUE(server_->controller()->LiveJobs().empty());
}

// Neither the size of the job nor the node matter then.
TEST_F(ServerTest, ADryRunShowsAModelThatASubmitRefuses) {
  v1::CreateJobRequest request = Request("r-1");
  request.mutable_spec()->set_recipe("untrainable");
  request.mutable_spec()->set_ranks(512);
  v1::CreateJobResponse response;
  EXPECT_EQ(ReasonOf(Create(request, &response)), v1::REASON_UNSUPPORTED_MODEL);
  request.set_validate_only(true);
  ASSERT_TRUE(Create(request, &response).ok());
  ASSERT_EQ(response.job().resolved().warnings_size(), 1);
  EXPECT_EQ(response.job().resolved().warnings(0), "a submit is refused: no such part");
}

TEST_F(ServerTest, BadRequestsAreRefusedByName) {
  const auto refused = [&](const std::function<void(v1::JobSpec&)>& change) {
    v1::CreateJobRequest request = Request();
    change(*request.mutable_spec());
    v1::CreateJobResponse response;
    return Create(request, &response);
  };
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.set_run_name("../etc"); })), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.set_priority(101); })), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.add_overrides(std::string(1'000'000, 'k') + "=1"); })), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.set_kind(v1::JOB_KIND_FINETUNE); })), v1::REASON_UNSUPPORTED_JOB_KIND);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.set_kind(v1::JOB_KIND_CONVERT); })), v1::REASON_INVALID_REQUEST) << "no action";
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.add_overrides("save=/etc"); })), v1::REASON_PATH_OUTSIDE_ROOTS);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.add_overrides("cache=/etc/x"); })), v1::REASON_PATH_OUTSIDE_ROOTS);
  EXPECT_EQ(ReasonOf(refused([](auto& s) { s.mutable_start()->set_checkpoint_id("x@1"); })), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(refused([](auto& s) {
              s.mutable_start()->set_mode(v1::START_MODE_FORK);
              s.mutable_start()->set_checkpoint_id("x@1");
            })),
            v1::REASON_CHECKPOINT_NOT_FOUND);
  EXPECT_TRUE(refused([this](auto& s) { s.add_overrides("save=" + directory_ + "/runs/mine"); }).ok());
  StartAgent(1);
  const grpc::Status too_large = refused([](auto& s) { s.set_ranks(64); });
  EXPECT_EQ(ReasonOf(too_large), v1::REASON_NOT_ENOUGH_RESOURCES);
  EXPECT_THAT(too_large.error_message(), HasSubstr("node-t"));
}

TEST_F(ServerTest, AFiveMegabyteRequestIsRefusedWithItsReason) {
  v1::CreateJobRequest request = Request();
  request.mutable_spec()->set_config_yaml(std::string(5 << 20, '#'));
  v1::CreateJobResponse response;
  const grpc::Status status = Create(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), v1::REASON_REQUEST_TOO_LARGE);
  EXPECT_FALSE(MustCreate(Request()).empty()) << "the connection goes on";
}

TEST_F(ServerTest, UnknownNamesSayWhereToLook) {
  grpc::ClientContext a, b, c, d;
  v1::GetJobRequest job;
  job.set_job_id("j-none");
  v1::GetJobResponse job_response;
  const grpc::Status status = jobs_->GetJob(&a, job, &job_response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(ReasonOf(status), v1::REASON_JOB_NOT_FOUND);
  EXPECT_EQ(ReasonOf(Watch("j-none").status), v1::REASON_JOB_NOT_FOUND);
  v1::GetCheckpointRequest checkpoint;
  checkpoint.set_checkpoint_id("x@1");
  v1::GetCheckpointResponse checkpoint_response;
  EXPECT_EQ(ReasonOf(v1::CheckpointService::NewStub(channel_)->GetCheckpoint(&b, checkpoint, &checkpoint_response)),
            v1::REASON_CHECKPOINT_NOT_FOUND);
  v1::DrainNodeRequest drain;
  drain.set_node_id("x");
  v1::DrainNodeResponse drain_response;
  EXPECT_EQ(ReasonOf(v1::NodeService::NewStub(channel_)->DrainNode(&c, drain, &drain_response)), v1::REASON_NODE_NOT_FOUND);
  v1::CancelJobRequest cancel;
  cancel.set_job_id("j-none");
  v1::CancelJobResponse cancel_response;
  EXPECT_EQ(ReasonOf(jobs_->CancelJob(&d, cancel, &cancel_response)), v1::REASON_JOB_NOT_FOUND);
}

TEST_F(ServerTest, ListsArePagedAndFiltered) {
  std::vector<std::string> created;
  for (int i = 0; i < 7; ++i) {
    v1::CreateJobRequest request = Request();
    (*request.mutable_spec()->mutable_labels())["team"] = i % 2 == 0 ? "even" : "odd";
    created.push_back(MustCreate(request));
    std::this_thread::sleep_for(milliseconds(2));  // Ids sort by milliseconds.
  }
  const auto list = [&](const std::string& filter, int size, std::string token, v1::ListJobsResponse* response) {
    grpc::ClientContext context;
    v1::ListJobsRequest request;
    request.set_filter(filter);
    request.set_page_size(size);
    request.set_page_token(token);
    response->Clear();
    return jobs_->ListJobs(&context, request, response);
  };
  v1::ListJobsResponse response;
  std::vector<std::string> seen;
  std::string token;
  int pages = 0;
  do {
    ASSERT_TRUE(list("", 3, token, &response).ok());
    for (const auto& job : response.jobs()) seen.push_back(job.job_id());
    token = response.next_page_token();
    ++pages;
  } while (!token.empty());
  EXPECT_EQ(pages, 3);
  std::reverse(created.begin(), created.end());
  EXPECT_EQ(seen, created);
  ASSERT_TRUE(list("label.team=odd AND state=queued AND live=true", 0, "", &response).ok());
  EXPECT_EQ(response.jobs_size(), 3);
  EXPECT_TRUE(response.next_page_token().empty());
  EXPECT_EQ(ReasonOf(list("", -1, "", &response)), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(list("", 1, "zz", &response)), v1::REASON_INVALID_REQUEST);
  EXPECT_EQ(ReasonOf(list("colour=red", 1, "", &response)), v1::REASON_INVALID_REQUEST);
  ASSERT_TRUE(list("", 1, "", &response).ok());
  token = response.next_page_token();
  EXPECT_EQ(ReasonOf(list("live=true", 1, token, &response)), v1::REASON_INVALID_REQUEST) << "a token of another list";
}

TEST_F(ServerTest, ProblemsOfThePreflightAreFieldViolations) {
  StartAgent(1);
  v1::PreflightProblem problem;
  problem.set_reason(v1::REASON_DATA_NOT_FOUND);
  problem.set_field("dataset.blend");
  problem.set_description("/data/x.idx does not exist");
  agent_->problems.push_back(problem);
  v1::CreateJobResponse response;
  const grpc::Status status = Create(Request("r-1"), &response);
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("/data/x.idx"));
  agent_->problems.clear();
  EXPECT_TRUE(Create(Request("r-1"), &response).ok()) << "a refusal is not remembered";
}

TEST_F(ServerTest, ThePreflightLearnsOfTheGpus) {
  std::vector<v1::Gpu> gpus(2);
  for (int i = 0; i < 2; ++i) {
    gpus[static_cast<size_t>(i)].set_uuid("GPU-" + std::to_string(i));
    gpus[static_cast<size_t>(i)].set_compute_capability(90 - 10 * i);
    gpus[static_cast<size_t>(i)].set_memory_bytes(1000 - 100 * i);
  }
  StartAgent(1, gpus);
  v1::CreateJobRequest request = Request();
  request.mutable_spec()->set_device(v1::DEVICE_CUDA);
  MustCreate(request);
  const v1::RankSpec spec = agent_->LastPreflight();
  EXPECT_EQ(spec.device(), v1::DEVICE_CUDA);
  EXPECT_EQ(spec.gpu_uuid(), "GPU-0");
  EXPECT_EQ(spec.gpu().uuid(), "GPU-0");
  EXPECT_EQ(spec.gpu().compute_capability(), 90);
  EXPECT_EQ(spec.gpus(), 2);
  EXPECT_EQ(spec.gpu_memory_bytes(), 900) << "of the smallest";
}

TEST_F(ServerTest, ASlowWatcherLosesProgressOnly) {
  const std::string job = MustCreate(Request());
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1024);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // Else the window grows beyond the test.
  auto slow =
      v1::JobService::NewStub(grpc::CreateCustomChannel(LocalAddress(directory_), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_job_id(job);
  auto reader = slow->WatchJob(&context, request);
  v1::WatchJobResponse response;
  ASSERT_TRUE(reader->Read(&response));
  StartAgent(3000);
  for (int i = 0; i < 3000 && server_->controller()->GetJob(job)->state() != v1::JOB_STATE_SUCCEEDED; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  ASSERT_EQ(server_->controller()->GetJob(job)->state(), v1::JOB_STATE_SUCCEEDED);
  std::vector<int64_t> sequences = {response.event().sequence()};
  int progress = 0;
  int64_t dropped = 0;
  bool ended = false;
  while (reader->Read(&response)) {
    dropped = response.dropped_progress();
    ended = ended || response.has_end();
    if (!response.has_event()) continue;
    if (response.event().kind() == v1::EVENT_KIND_PROGRESS) {
      ++progress;
    } else {
      sequences.push_back(response.event().sequence());
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(ended);
  for (size_t i = 0; i < sequences.size(); ++i)
    EXPECT_EQ(sequences[i], static_cast<int64_t>(i + 1)) << "state events are all there";
  EXPECT_GT(dropped, 0);
  EXPECT_LT(progress, 3000);
}

// A client that pings its quiet stream every second (gRPC sends no faster): cut off at the fourth by a server that permits less,
// left alone by one that permits it. With longer limits on both sides this is mbctl (30 s) against the coordinator (10 s).
TEST_F(ServerTest, PingsOfAQuietStreamDoNotCutIt) {
  const auto survives = [this](milliseconds min_ping_interval) {
    ServerOptions options = Options();
    options.min_ping_interval = min_ping_interval;
    StartServer(std::move(options));
    const std::string job = MustCreate(Request());
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 100);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_MIN_SENT_PING_INTERVAL_WITHOUT_DATA_MS, 100);  // gRPC holds pings back for 5 minutes else.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto pinging = v1::JobService::NewStub(
        grpc::CreateCustomChannel(LocalAddress(directory_), grpc::InsecureChannelCredentials(), arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + milliseconds(4500));
    v1::WatchJobRequest request;
    request.set_job_id(job);
    auto reader = pinging->WatchJob(&context, request);
    v1::WatchJobResponse response;
    while (reader->Read(&response)) {}
    return reader->Finish().error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  };
  EXPECT_FALSE(survives(milliseconds(10'000)));
  EXPECT_TRUE(survives(milliseconds(500)));
}

TEST_F(ServerTest, StreamsEndWithAReasonWhenTheServerStops) {
  const std::string job = MustCreate(Request());
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_job_id(job);
  auto reader = jobs_->WatchJob(&context, request);
  v1::WatchJobResponse response;
  ASSERT_TRUE(reader->Read(&response));
  std::thread stopper([&] { server_->Stop(); });
  while (reader->Read(&response)) {}
  const grpc::Status status = reader->Finish();
  stopper.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(status), v1::REASON_SERVICE_STOPPING);
  server_.reset();
  StartServer();
  EXPECT_EQ(server_->controller()->GetJob(job)->state(), v1::JOB_STATE_QUEUED) << "jobs go on";
}

TEST_F(ServerTest, ShutdownEndsTheJobsThenTheAgent) {
  StartAgent(1'000'000);
  const std::string job = MustCreate(Request());
  Watch(job, 0, 3);  // Running.
  grpc::ClientContext context;
  v1::ShutdownResponse response;
  ASSERT_TRUE(v1::AdminService::NewStub(channel_)->Shutdown(&context, v1::ShutdownRequest(), &response).ok());
  EXPECT_EQ(response.jobs_ended(), 1);
  for (int i = 0; i < 100 && !server_->exit_requested(); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(server_->exit_requested());
  EXPECT_TRUE(agent_->ended);
  EXPECT_EQ(server_->controller()->GetJob(job)->state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(server_->controller()->GetJob(job)->reason(), v1::REASON_SHUTDOWN);
  v1::CreateJobResponse refused;
  EXPECT_EQ(ReasonOf(Create(Request(), &refused)), v1::REASON_SERVICE_STOPPING);
}

TEST_F(ServerTest, APortInUseAndALockedStoreAreNamed) {
  ServerOptions options = Options();
  EXPECT_EQ(mbridge::ReasonOf(Server::Start(options, FakeRecipes()).status()), v1::REASON_STORE_LOCKED);
  options.state_directory = directory_ + "/second";
  options.listen = {"127.0.0.1:0"};
  const auto first = Server::Start(options, FakeRecipes());
  ASSERT_TRUE(first.ok()) << first.status();
  options.state_directory = directory_ + "/third";
  options.listen = {"127.0.0.1:" + std::to_string((*first)->ports()[0])};
  const auto second = Server::Start(options, FakeRecipes());
  EXPECT_EQ(mbridge::ReasonOf(second.status()), v1::REASON_PORT_IN_USE);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(options.listen[0]));
}

}  // namespace
}  // namespace mbridge::server
