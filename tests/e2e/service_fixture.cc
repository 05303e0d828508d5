#include "tests/e2e/service_fixture.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <set>
#include <sstream>

namespace mbridge::e2e {
namespace {

constexpr char kIdVariable[] = "MB_E2E_ID";
constexpr auto kCallTimeout = std::chrono::seconds(10);

std::unique_ptr<grpc::ClientContext> CallContext() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + kCallTimeout);
  return context;
}

void ExpectOk(const grpc::Status& status, const char* call) {
  EXPECT_TRUE(status.ok()) << call << ": " << status.error_message();
}

Arguments Concatenate(Arguments first, const Arguments& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

bool Connects(const std::filesystem::path& unix_socket) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  unix_socket.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
  const bool connected = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

// `more` after `first`, without those of `first` whose key `more` sets again.
Arguments Overridden(const Arguments& first, const Arguments& more) {
  const auto key = [](const std::string& text) { return text.substr(0, text.find('=')); };
  Arguments result;
  for (const std::string& argument : first) {
    const bool again =
        argument.find('=') != std::string::npos &&
        std::any_of(more.begin(), more.end(), [&](const std::string& other) { return key(other) == key(argument); });
    if (!again) result.push_back(argument);
  }
  return Concatenate(result, more);
}

}  // namespace

std::filesystem::path Program(const std::string& name) { return std::filesystem::path(MB_BINARY_DIR) / "bin" / name; }

ScratchDirectory::ScratchDirectory() {
  std::string name = "/tmp/mb-e2e-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
  path_ = name;
}

ScratchDirectory::~ScratchDirectory() {
  if (getenv("MB_E2E_KEEP") != nullptr) {
    fprintf(stderr, "kept: %s\n", path_.c_str());
    return;
  }
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Service::Service(Options options) : options_(std::move(options)) {
  static std::atomic<int> counter = 0;
  id_ = std::to_string(getpid()) + "-" + std::to_string(++counter);
  metrics_port_ = FreePort();
  if (options_.tcp) port_ = FreePort();
}

Service::~Service() {
  coordinator_ = Process();
  // Agents restart ranks and shims write records: end the supervisors first, repeat until nothing is left.
  WaitUntil(
      [this] {
        const auto pids = Pids();
        for (const pid_t pid : pids) kill(pid, SIGKILL);
        return pids.empty();
      },
      Seconds(10));
  if (testing::Test::HasFailure()) fprintf(stderr, "---- coordinator log ----\n%s\n", log_text().c_str());
}

bool Service::Start(Seconds timeout) {
  Arguments arguments = {Program("mbcoordinator"), "--state-dir", state_directory(), "--listen", address()};
  if (options_.tcp) arguments = Concatenate(arguments, {"--listen", tcp_address()});
  arguments = Concatenate(arguments, {"--metrics-listen", metrics_address()});
  arguments = Concatenate(arguments, options_.extra_arguments);
  SpawnOptions spawn;
  spawn.environment = options_.environment;
  spawn.environment[kIdVariable] = id_;
  spawn.out_path = directory() / "coordinator.log";
  spawn.err_path = directory() / "coordinator.log";
  coordinator_ = Process(arguments, spawn);
  // gRPC backs off for seconds after a refused connection: a plain connect() finds the socket sooner, and a new channel
  // knows no backoff.
  const bool listens =
      WaitUntil([this] { return !coordinator_.running() || Connects(state_directory() / "coordinator.sock"); }, timeout);
  ResetChannel();
  return listens &&
         WaitUntil(
             [this] {
               if (!coordinator_.running()) return true;
               v1::GetServerInfoResponse response;
               return admin().GetServerInfo(CallContext().get(), {}, &response).ok();
             },
             timeout) &&
         coordinator_.running();
}

CommandResult Service::RunCoordinator(const Arguments& arguments, Seconds timeout) const {
  SpawnOptions spawn;
  spawn.environment = {{kIdVariable, id_}};
  return RunCommand(Concatenate({Program("mbcoordinator")}, arguments), spawn, timeout);
}

Process Service::StartAgent(const std::string& name, const Arguments& arguments) const {
  SpawnOptions spawn;
  spawn.environment = options_.environment;
  spawn.environment[kIdVariable] = id_;
  spawn.out_path = spawn.err_path = directory() / (name + ".log");
  return Process(Concatenate({Program("mbagent"), "--coordinator", address(), "--state-dir", directory() / name}, arguments),
                 spawn);
}

std::string Service::Scrape() const {
  return RunCommand({"curl", "-s", "--max-time", "5", "http://" + metrics_address() + "/metrics"}).out;
}

std::string Service::log_text() const { return ReadFile(directory() / "coordinator.log"); }

SpawnOptions Service::MbctlOptions() const {
  SpawnOptions spawn;
  spawn.environment = {{"MBCTL_SERVER", address()}, {"HOME", directory().string()}, {"NO_COLOR", ""}, {"TERM", "dumb"}};
  return spawn;
}

CommandResult Service::Mbctl(const Arguments& arguments, Seconds timeout) const {
  return RunCommand(Concatenate({Program("mbctl")}, arguments), MbctlOptions(), timeout);
}

std::vector<pid_t> Service::Pids(const std::string& program) const {
  std::vector<pid_t> pids;
  for (const pid_t pid : ProcessesWithEnvironment(kIdVariable, id_)) {
    if (program.empty() || ProgramOf(pid) == program) pids.push_back(pid);
  }
  return pids;
}

bool Service::NoneLeft(const std::string& program, Seconds timeout) const {
  return WaitUntil([&] { return Pids(program).empty(); }, timeout);
}

void Service::ResetChannel() {
  jobs_.reset();
  checkpoints_.reset();
  nodes_.reset();
  admin_.reset();
  channel_.reset();
}

std::shared_ptr<grpc::Channel> Service::channel() {
  if (channel_ == nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
  }
  return channel_;
}

v1::JobService::Stub& Service::jobs() {
  if (jobs_ == nullptr) jobs_ = v1::JobService::NewStub(channel());
  return *jobs_;
}

v1::CheckpointService::Stub& Service::checkpoints() {
  if (checkpoints_ == nullptr) checkpoints_ = v1::CheckpointService::NewStub(channel());
  return *checkpoints_;
}

v1::NodeService::Stub& Service::nodes() {
  if (nodes_ == nullptr) nodes_ = v1::NodeService::NewStub(channel());
  return *nodes_;
}

v1::AdminService::Stub& Service::admin() {
  if (admin_ == nullptr) admin_ = v1::AdminService::NewStub(channel());
  return *admin_;
}

v1::Job Service::GetJob(const std::string& job_id) {
  v1::GetJobRequest request;
  request.set_job_id(job_id);
  v1::GetJobResponse response;
  ExpectOk(jobs().GetJob(CallContext().get(), request, &response), "GetJob");
  return response.job();
}

v1::Job Service::WaitForJob(const std::string& job_id, const std::function<bool(const v1::Job&)>& predicate, Seconds timeout) {
  v1::Job job;
  const bool held = WaitUntil(
      [&] {
        v1::GetJobRequest request;
        request.set_job_id(job_id);
        v1::GetJobResponse response;
        if (!jobs().GetJob(CallContext().get(), request, &response).ok()) return false;
        job = response.job();
        return predicate(job);
      },
      timeout);
  EXPECT_TRUE(held) << "waited " << timeout.count() << " s in vain; the job is\n" << job.ShortDebugString().substr(0, 3000);
  return job;
}

v1::Job Service::WaitForEnd(const std::string& job_id, Seconds timeout) {
  return WaitForJob(
      job_id, [](const v1::Job& job) { return Terminal(job.state()); }, timeout);
}

v1::Job Service::WaitForStep(const std::string& job_id, int64_t step, Seconds timeout) {
  return WaitForJob(
      job_id, [step](const v1::Job& job) { return job.progress().step() >= step || Terminal(job.state()); }, timeout);
}

std::vector<v1::MetricPoint> Service::Points(const std::string& job_id, v1::MetricKind kind, bool effective) {
  v1::StreamMetricsRequest request;
  request.set_job_id(job_id);
  request.set_effective(effective);
  const auto context = CallContext();
  const auto reader = jobs().StreamMetrics(context.get(), request);
  std::vector<v1::MetricPoint> points;
  v1::StreamMetricsResponse response;
  while (reader->Read(&response)) {
    for (const v1::MetricPoint& point : response.points()) {
      if (point.kind() == kind) points.push_back(point);
    }
  }
  ExpectOk(reader->Finish(), "StreamMetrics");
  return points;
}

std::vector<v1::MetricPoint> Service::TrainPoints(const std::string& job_id, bool effective) {
  return Points(job_id, v1::METRIC_KIND_TRAIN, effective);
}

std::vector<v1::Checkpoint> Service::Checkpoints(const std::string& run_name) {
  v1::ListCheckpointsRequest request;
  request.set_run_name(run_name);
  v1::ListCheckpointsResponse response;
  ExpectOk(checkpoints().ListCheckpoints(CallContext().get(), request, &response), "ListCheckpoints");
  return {response.checkpoints().begin(), response.checkpoints().end()};
}

std::vector<v1::JobEvent> Service::Events(const std::string& job_id) {
  v1::WatchJobRequest request;
  request.set_job_id(job_id);
  const auto context = CallContext();
  const auto reader = jobs().WatchJob(context.get(), request);
  std::vector<v1::JobEvent> events;
  v1::WatchJobResponse response;
  while (reader->Read(&response)) {
    if (response.has_event()) events.push_back(response.event());
  }
  return events;
}

std::string Service::Submit(const Arguments& arguments) {
  const CommandResult result = Mbctl(Concatenate({"submit", "-o", "name"}, arguments));
  EXPECT_THAT(result, Exited(0));
  return result.out.substr(0, result.out.find('\n'));
}

Arguments TinyJob(int iterations, const Arguments& more) {
  const std::string n = std::to_string(iterations);
  return Overridden({"--recipe", "vanilla_gpt_pretrain_config", "--device", "cpu", "model.num_layers=1", "model.hidden_size=32",
                     "model.num_attention_heads=2", "model.ffn_hidden_size=64", "model.seq_length=32", "dataset.seq_length=32",
                     "tokenizer.vocab_size=256", "train.train_iters=" + n, "train.global_batch_size=4",
                     "train.micro_batch_size=2", "validation.eval_interval=1000", "validation.eval_iters=1",
                     "scheduler.lr_warmup_iters=1", "scheduler.lr_decay_iters=" + n, "logger.log_interval=1"},
                    more);
}

Arguments SlowJob(int iterations, const Arguments& more) {
  return Overridden(TinyJob(iterations, {"model.hidden_size=64", "model.ffn_hidden_size=256", "model.seq_length=128",
                                         "dataset.seq_length=128", "train.global_batch_size=16"}),
                    more);
}

bool Terminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED || state == v1::JOB_STATE_CANCELLED;
}

testing::AssertionResult CompleteSeries(const std::vector<v1::MetricPoint>& points, int64_t last) {
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i].step() != static_cast<int64_t>(i) + 1) {
      return testing::AssertionFailure() << "point " << i << " has step " << points[i].step() << " (attempt "
                                         << points[i].attempt() << "), expected step " << i + 1;
    }
  }
  if (static_cast<int64_t>(points.size()) != last) {
    return testing::AssertionFailure() << "the series ends at step " << points.size() << " instead of " << last;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameLosses(const std::vector<v1::MetricPoint>& a, const std::vector<v1::MetricPoint>& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " points";
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].step() != b[i].step() || std::bit_cast<uint64_t>(a[i].lm_loss()) != std::bit_cast<uint64_t>(b[i].lm_loss()) ||
        std::bit_cast<uint64_t>(a[i].grad_norm()) != std::bit_cast<uint64_t>(b[i].grad_norm()) ||
        a[i].learning_rate() != b[i].learning_rate() || a[i].consumed_samples() != b[i].consumed_samples()) {
      return testing::AssertionFailure() << "point " << i << " differs:\n" << a[i].DebugString() << "and\n" << b[i].DebugString();
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SoundEvents(const std::vector<v1::JobEvent>& events) {
  int64_t last = 0;
  bool ended = false;
  for (const v1::JobEvent& event : events) {
    if (event.kind() == v1::EVENT_KIND_PROGRESS) continue;
    if (event.sequence() != last + 1) {
      return testing::AssertionFailure() << "event " << event.ShortDebugString() << " follows sequence " << last;
    }
    last = event.sequence();
    if (event.kind() != v1::EVENT_KIND_STATE) continue;
    if (ended) return testing::AssertionFailure() << "a state after the terminal one: " << event.ShortDebugString();
    ended = Terminal(event.state());
  }
  return testing::AssertionSuccess();
}

}  // namespace mbridge::e2e
