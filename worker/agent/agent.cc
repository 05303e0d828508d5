#include "worker/agent/agent.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"
#include "worker/spool/timestamp.h"

namespace mbridge::agent {
namespace {

namespace fs = std::filesystem;

constexpr auto kShutdownKill = std::chrono::seconds(20);
constexpr auto kShutdownReport = std::chrono::seconds(5);
constexpr auto kReadRetry = std::chrono::seconds(1);
constexpr int kBusyWaitMs = 200;  // How stale a metric may become while an attempt runs.
constexpr int kIdleWaitMs = 3000;
// A forgotten attempt leaves its name behind, so that a late order cannot start it again.
constexpr const char* kDonePrefix = ".done-";
constexpr auto kDoneKept = std::chrono::hours(24 * 7);

std::string RandomName(size_t length) {
  constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyz234567";
  std::random_device random;
  std::string name;
  while (name.size() < length) name += kAlphabet[random() % kAlphabet.size()];
  return name;
}

// Job ids become directory names.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name.size() <= 64 && name[0] != '.' && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

absl::StatusOr<int> TakeLock(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return spool::ErrnoStatus(errno, "cannot open " + path);
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd);
    std::string pid = spool::ReadFile(path).value_or("");
    while (!pid.empty() && pid.back() == '\n') pid.pop_back();
    return absl::FailedPreconditionError(fmt::format("another agent (pid {}) uses this state directory: it holds {}", pid, path));
  }
  const std::string pid = fmt::format("{}\n", ::getpid());
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    spdlog::warn("cannot write the pid into {}", path);  // The lock itself holds.
  }
  return fd;
}

v1::Reason StopCause(v1::DesiredState desired) {
  return desired == v1::DESIRED_STATE_STOP ? v1::REASON_CANCELLED_BY_USER : v1::REASON_KILLED_BY_USER;
}

}  // namespace

Agent::Agent(const AgentOptions& options, int lock)
    : options_(options),
      lock_(lock),
      instance_(RandomName(12)),
      tasks_(options.state_directory + "/tasks", options.programs, options.task_limits) {}

Agent::~Agent() { ::close(lock_); }

absl::StatusOr<std::unique_ptr<Agent>> Agent::Open(const AgentOptions& options) {
  std::error_code error;
  fs::create_directories(options.state_directory + "/attempts", error);
  if (!error) fs::permissions(options.state_directory, fs::perms::owner_all, error);
  if (error) return spool::ErrnoStatus(error.value(), "cannot create " + options.state_directory + "/attempts");
  MB_ASSIGN_OR_RETURN(const int lock, TakeLock(options.state_directory + "/agent.lock"));
  std::unique_ptr<Agent> agent(new Agent(options, lock));
  MB_RETURN_IF_ERROR(agent->LoadNodeId());
  agent->LoadAttempts();
  return agent;
}

absl::Status Agent::LoadNodeId() {
  const std::string path = options_.state_directory + "/node_id";
  const absl::StatusOr<std::string> kept = spool::ReadFile(path);
  if (kept.ok() && IsPlainName(*kept)) {
    node_id_ = *kept;
    return absl::OkStatus();
  }
  if (!kept.ok() && !absl::IsNotFound(kept.status())) return kept.status();
  node_id_ = "n-" + RandomName(12);
  return spool::WriteFileAtomically(path, node_id_);
}

void Agent::LoadAttempts() {
  const auto now = fs::file_time_type::clock::now();
  std::error_code error;
  std::vector<fs::path> entries;
  for (const auto& entry : fs::directory_iterator(options_.state_directory + "/attempts", error)) entries.push_back(entry.path());
  for (const fs::path& path : entries) {
    const std::string name = path.filename();
    if (name.starts_with(".new-") || (name.starts_with(kDonePrefix) && now - fs::last_write_time(path, error) > kDoneKept)) {
      fs::remove_all(path, error);
    }
    if (name.starts_with('.')) continue;
    auto attempt = Attempt::Load(path, options_.inventory.boot_id());
    if (const auto key = ParseAttemptName(name); key.has_value() && absl::IsUnavailable(attempt.status())) {
      spdlog::error("attempt {} cannot be read now, its ranks go on: {}", name, std::string(attempt.status().message()));
      unreadable_[*key] = false;
      continue;
    }
    if (!attempt.ok()) {
      spdlog::error("attempt {} cannot be read and is left alone: {}", name, std::string(attempt.status().message()));
      continue;
    }
    const Key key{(*attempt)->job_id(), (*attempt)->attempt()};
    spdlog::info("found attempt {} of job {}", key.second, key.first);
    attempts_[key] = *std::move(attempt);
  }
}

void Agent::RetryUnreadable(TimePoint now) {
  if (unreadable_.empty() || now - unreadable_tried_at_ < kReadRetry) return;
  unreadable_tried_at_ = now;
  for (auto it = unreadable_.begin(); it != unreadable_.end();) {
    const auto& [key, give_up] = *it;
    auto attempt = Attempt::Load(DirectoryOf(key), options_.inventory.boot_id(), give_up || shutdown_at_.has_value());
    if (!attempt.ok()) {
      ++it;
      continue;
    }
    spdlog::info("attempt {} of job {} is taken up again", key.second, key.first);
    attempts_[key] = *std::move(attempt);
    it = unreadable_.erase(it);
  }
}

std::string Agent::DirectoryOf(const Key& key) const {
  return fmt::format("{}/attempts/{}.{}", options_.state_directory, key.first, key.second);
}

bool Agent::AllEnded() const {
  return unreadable_.empty() &&
         std::all_of(attempts_.begin(), attempts_.end(), [](const auto& entry) { return entry.second->ended(); });
}

void Agent::Tick(TimePoint now) {
  children_.Reap();
  RetryUnreadable(now);
  for (auto& [key, attempt] : attempts_) {
    if (shutdown_at_.has_value()) {
      attempt->SetDesired(now - *shutdown_at_ > kShutdownKill ? v1::DESIRED_STATE_KILL : v1::DESIRED_STATE_STOP,
                          v1::REASON_SHUTDOWN);
    }
    const v1::AttemptPhase before = attempt->phase();
    attempt->Tick(now, options_.programs, &children_);
    if (attempt->phase() != before) {
      spdlog::info("attempt {} of job {}: {}", key.second, key.first, v1::AttemptPhase_Name(attempt->phase()).substr(14));
    }
  }
  tasks_.Tick(now, &children_);
  if (shutdown_at_.has_value() && !ended_at_.has_value() && AllEnded()) ended_at_ = now;
}

v1::SyncRequest Agent::BuildRequest() {
  v1::SyncRequest request;
  request.set_node_id(node_id_);
  request.set_agent_instance(instance_);
  request.set_seen_version(seen_version_);
  *request.mutable_inventory() = options_.inventory;
  Budget budget;
  bool undrained = false;
  for (auto& [key, attempt] : attempts_) {
    attempt->Report(request.add_attempts(), &budget);
    undrained = undrained || !attempt->drained();
  }
  for (const auto& [key, give_up] : unreadable_) {
    v1::AttemptReport* report = request.add_attempts();
    report->set_job_id(key.first);
    report->set_attempt(key.second);
    report->set_phase(v1::ATTEMPT_PHASE_RUNNING);
    undrained = true;
  }
  for (const auto& [key, report] : failed_starts_) *request.add_attempts() = report;
  tasks_.FillResults(&request);
  const bool more_to_send = budget.records <= 0 || budget.logs <= 0;
  request_had_ends_ = ended_at_.has_value() && !undrained;
  if (ended_at_.has_value() && !shutdown_task_.empty()) {
    v1::TaskResult* result = request.add_results();
    result->set_task_id(shutdown_task_);
    result->set_ok(true);
  }
  const bool busy = undrained || tasks_.running() || shutdown_at_.has_value();
  request.set_wait_ms(more_to_send ? 0 : busy ? kBusyWaitMs : kIdleWaitMs);
  return request;
}

void Agent::Apply(const v1::SyncResponse& response, TimePoint now) {
  ends_reported_ = request_had_ends_;
  seen_version_ = response.version();
  for (auto& [key, attempt] : attempts_) {
    attempt->Delivered();
    if (response.coordinator_instance() != coordinator_instance_) attempt->CoordinatorChanged();
  }
  coordinator_instance_ = response.coordinator_instance();
  for (const std::string& id : response.acknowledged_results()) tasks_.Acknowledge(id);
  for (const v1::AttemptOrder& order : response.orders()) ApplyOrder(order);
  for (const v1::NodeTask& task : response.tasks()) {
    if (task.has_shutdown()) {
      shutdown_task_ = task.task_id();
      BeginShutdown(now);
    } else {
      tasks_.Add(task, now, &children_);
    }
  }
}

void Agent::ApplyOrder(const v1::AttemptOrder& order) {
  if (!IsPlainName(order.job_id()) || order.attempt() < 1) {
    spdlog::error("an order with job_id \"{}\", attempt {} is ignored: ids are 1 to 64 letters, digits, - or _", order.job_id(),
                  order.attempt());
    return;
  }
  const Key key{order.job_id(), order.attempt()};
  if (const auto unreadable = unreadable_.find(key); unreadable != unreadable_.end()) {
    // A graceful stop can wait for the disk: the coordinator turns it into a kill.
    unreadable->second = order.desired() == v1::DESIRED_STATE_KILL || order.desired() == v1::DESIRED_STATE_FORGET;
    return;
  }
  const auto known = attempts_.find(key);
  if (known == attempts_.end()) {
    if (order.desired() == v1::DESIRED_STATE_FORGET) failed_starts_.erase(key);
    if (order.desired() == v1::DESIRED_STATE_RUN) StartAttempt(order);
    return;
  }
  known->second->Acknowledge(order);
  known->second->SetDesired(order.desired(), StopCause(order.desired()));
  if (order.desired() == v1::DESIRED_STATE_FORGET && known->second->ended()) Forget(key);
}

bool Agent::OlderAttemptLives(const v1::AttemptOrder& order) {
  bool lives = false;
  for (auto& [key, attempt] : attempts_) {
    if (key.first != order.job_id() || key.second >= order.attempt() || attempt->ended()) continue;
    attempt->SetDesired(v1::DESIRED_STATE_KILL, v1::REASON_PEER_LOST);
    lives = true;
  }
  for (auto& [key, give_up] : unreadable_) {
    if (key.first != order.job_id() || key.second >= order.attempt()) continue;
    give_up = lives = true;
  }
  return lives;
}

void Agent::StartAttempt(const v1::AttemptOrder& order) {
  const Key key{order.job_id(), order.attempt()};
  if (failed_starts_.count(key) > 0 || shutdown_at_.has_value() || OlderAttemptLives(order)) return;
  const auto newest = attempts_.lower_bound({order.job_id(), order.attempt() + 1});
  if (newest != attempts_.end() && newest->first.first == order.job_id()) {
    return ReportFailedStart(order, absl::FailedPreconditionError("a newer attempt of the job is known here"));
  }
  const std::string directory = DirectoryOf(key);
  if (fs::exists(spool::DirectoryOf(directory) + "/" + kDonePrefix + fs::path(directory).filename().string())) {
    return ReportFailedStart(order, absl::FailedPreconditionError("the attempt has run here already"));
  }
  auto attempt = Attempt::Create(directory, order, options_.inventory.boot_id());
  if (!attempt.ok()) return ReportFailedStart(order, attempt.status());
  spdlog::info("starts attempt {} of job {} with {} ranks", key.second, key.first, order.ranks().size());
  (*attempt)->Acknowledge(order);
  (*attempt)->SetDesired(order.desired(), v1::REASON_UNSPECIFIED);
  attempts_[key] = *std::move(attempt);
}

void Agent::ReportFailedStart(const v1::AttemptOrder& order, const absl::Status& status) {
  spdlog::error("attempt {} of job {} cannot start: {}", order.attempt(), order.job_id(), std::string(status.message()));
  const v1::Reason reason = ReasonOf(status);
  v1::AttemptReport& report = failed_starts_[{order.job_id(), order.attempt()}];
  report.set_job_id(order.job_id());
  report.set_attempt(order.attempt());
  report.set_phase(v1::ATTEMPT_PHASE_ENDED);
  report.set_drained(true);
  for (const v1::RankSpec& spec : order.ranks()) {
    v1::RankEnd* end = report.add_rank_ends();
    end->set_rank(spec.rank());
    end->set_exit_code(-1);
    end->set_reason(reason != v1::REASON_UNSPECIFIED ? reason : v1::REASON_SPAWN_FAILED);
    end->set_detail(std::string(status.message()));
    *end->mutable_time() = spool::NowTimestamp();
  }
}

void Agent::Forget(const Key& key) {
  const bool drained = attempts_.at(key)->drained();
  attempts_.erase(key);
  const fs::path directory = DirectoryOf(key);
  const fs::path done = directory.parent_path() / (kDonePrefix + directory.filename().string());
  std::error_code error;
  fs::rename(directory, done, error);
  if (error) {
    spdlog::error("cannot forget {}: {}", directory.string(), error.message());
    return;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(done, error)) files.push_back(entry.path());
  for (const fs::path& file : files) {
    const bool log = file.extension() == ".log";
    if (!log || drained) fs::remove_all(file, error);  // Logs that never reached the coordinator stay for a week.
  }
  spdlog::info("forgot attempt {} of job {}", key.second, key.first);
}

void Agent::BeginShutdown(TimePoint now) {
  if (shutdown_at_.has_value()) return;
  spdlog::info("shutdown: ends every rank");
  shutdown_at_ = now;
}

bool Agent::finished(TimePoint now) const {
  if (!ended_at_.has_value()) return false;
  if (attempts_.empty() && shutdown_task_.empty()) return true;
  return ends_reported_ || now - *ended_at_ > kShutdownReport;
}

}  // namespace mbridge::agent
