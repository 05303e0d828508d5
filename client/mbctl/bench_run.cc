#include "client/mbctl/bench_run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "client/mbctl/interrupt.h"
#include "client/mbctl/rank_program.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::milliseconds(20);
// After the first rank failed: for the others to say why they did.
constexpr auto kPeersMayEnd = std::chrono::seconds(3);
constexpr size_t kLastLines = 8;

// Exit code 1, or the reason's own.
absl::Status Failed(v1::Reason reason, const std::string& why) { return MakeStatus(absl::StatusCode::kInternal, reason, why); }

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::error_code error;
    std::string name = (std::filesystem::temp_directory_path(error) / "mbctl-bench-XXXXXX").string();
    if (!error && mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  // Empty where it could not be made.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The records of a file that its rank still writes.
class RecordReader {
 public:
  explicit RecordReader(std::filesystem::path path) : path_(std::move(path)) {}
  // Those that are there since the last call.
  std::vector<v1::RankRecord> Next() {
    std::ifstream file(path_, std::ios::binary);
    file.seekg(offset_);
    std::vector<v1::RankRecord> records;
    for (std::string line; std::getline(file, line) && !file.eof();) {  // At its end a line may be half there.
      offset_ += static_cast<std::streamoff>(line.size()) + 1;
      v1::RankRecord record;
      if (google::protobuf::util::JsonStringToMessage(line, &record).ok()) records.push_back(std::move(record));
    }
    return records;
  }

 private:
  std::filesystem::path path_;
  std::streamoff offset_ = 0;
};

std::string LastLines(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.empty()) continue;
    lines.push_back(line);
    if (lines.size() > kLastLines) lines.pop_front();
  }
  std::string text;
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

struct Rank {
  std::filesystem::path events, log;
  pid_t process = -1;
  bool running = false;
  bool killed = false;  // By us.
  int status = 0;
  int64_t most_resident_bytes = 0;
};

// What it said of its end, if anything.
std::optional<v1::RankResult> EndOf(const Rank& rank) {
  for (v1::RankRecord& record : RecordReader(rank.events).Next()) {
    if (record.has_finished()) return std::move(*record.mutable_finished());
  }
  return std::nullopt;
}

std::string DescribeStatus(int status) {
  if (WIFSIGNALED(status)) return fmt::format("signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("exit code {}", WEXITSTATUS(status));
}

bool IsSymptom(v1::Reason reason) { return reason == v1::REASON_PEER_LOST || reason == v1::REASON_COLLECTIVE_TIMEOUT; }

// The processes. Those that still run are killed and reaped at the end of its life.
class Ranks {
 public:
  Ranks() = default;
  ~Ranks() {
    Kill();
    while (Reap()) std::this_thread::sleep_for(kPollInterval);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  absl::Status Start(const v1::JobSpec& spec, const std::filesystem::path& directory);
  // Notes which have ended; true while one runs.
  bool Reap();
  void Kill();
  bool failed() const { return !failed_.empty(); }
  const Rank& first() const { return ranks_.front(); }
  // Of the one that the others failed for: the first that failed, but rather one that does not only miss a peer.
  absl::Status Why() const;

 private:
  std::vector<Rank> ranks_;
  std::vector<size_t> failed_;  // In the order of their ends, without those that were killed.
};

absl::Status Ranks::Start(const v1::JobSpec& spec, const std::filesystem::path& directory) {
  RankProgramStart start;
  const bool cuda = spec.device() == v1::DEVICE_CUDA;
  start.name = cuda ? kCudaRankProgram : kCpuRankProgram;
  start.background = true;
  std::vector<std::string> devices;
  if (cuda && spec.ranks() > 1) {  // A rank by itself takes the first visible GPU.
    MB_ASSIGN_OR_RETURN(devices, DevicesOfRanks(std::getenv("CUDA_VISIBLE_DEVICES"), spec.ranks()));
  }
  const auto meeting = directory / "meet", config = directory / "config.yaml";
  std::error_code error;
  std::filesystem::create_directory(meeting, error);
  std::ofstream(config) << spec.config_yaml();
  for (int i = 0; i < spec.ranks(); ++i) {
    Rank rank;
    rank.events = directory / fmt::format("rank-{}.events", i);
    rank.log = directory / fmt::format("rank-{}.log", i);
    start.arguments = {"train",
                       "--device",
                       cuda ? "cuda" : "cpu",
                       "--rank",
                       std::to_string(i),
                       "--ranks",
                       std::to_string(spec.ranks()),
                       "--rendezvous",
                       meeting,
                       "--events",
                       rank.events};
    if (!spec.recipe().empty()) start.arguments.insert(start.arguments.end(), {"--recipe", spec.recipe()});
    if (!spec.config_yaml().empty()) start.arguments.insert(start.arguments.end(), {"--config", config});
    start.arguments.insert(start.arguments.end(), spec.overrides().begin(), spec.overrides().end());
    if (!devices.empty()) start.environment = {{"CUDA_VISIBLE_DEVICES", devices[static_cast<size_t>(i)]}};
    const int log = open(rank.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0) return Failed(v1::REASON_SPAWN_FAILED, fmt::format("cannot write {}: {}", rank.log.string(), strerror(errno)));
    start.out = start.err = log;
    const auto process = StartRankProgram(start);
    close(log);
    MB_ASSIGN_OR_RETURN(rank.process, process);
    rank.running = true;
    ranks_.push_back(std::move(rank));
  }
  return absl::OkStatus();
}

bool Ranks::Reap() {
  bool any = false;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    rusage usage{};
    if (rank.running && wait4(rank.process, &rank.status, WNOHANG, &usage) == rank.process) {
      rank.running = false;
      rank.most_resident_bytes = int64_t{usage.ru_maxrss} * 1024;
      const bool good = WIFEXITED(rank.status) && WEXITSTATUS(rank.status) == 0;
      if (!good && !rank.killed) failed_.push_back(i);
    }
    any |= rank.running;
  }
  return any;
}

void Ranks::Kill() {
  for (Rank& rank : ranks_) {
    if (!rank.running || rank.killed) continue;
    rank.killed = true;
    kill(rank.process, SIGKILL);
    kill(rank.process, SIGCONT);
  }
}

absl::Status Ranks::Why() const {
  const auto is_symptom = [this](size_t index) {
    const auto end = EndOf(ranks_[index]);
    return end && IsSymptom(end->reason());
  };
  const auto cause = std::find_if_not(failed_.begin(), failed_.end(), is_symptom);
  const size_t index = cause == failed_.end() ? failed_.front() : *cause;
  const Rank& rank = ranks_[index];
  const std::string name = fmt::format("rank {} of {}", index, ranks_.size());
  if (const auto end = EndOf(rank)) return Failed(end->reason(), fmt::format("{}: {}", name, end->detail()));
  // The table's words for such an end are about a job's log.
  return absl::InternalError(fmt::format("{} ended with {} without saying why; its last lines:{}", name,
                                         DescribeStatus(rank.status), LastLines(rank.log)));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> DevicesOfRanks(const char* visible, int ranks) {
  std::vector<std::string> devices;
  if (visible == nullptr) {
    for (int i = 0; i < ranks; ++i) devices.push_back(std::to_string(i));
    return devices;
  }
  std::string list = visible;
  for (size_t begin = 0; begin < list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    devices.push_back(list.substr(begin, comma - begin));
    begin = comma + 1;
  }
  if (devices.size() < static_cast<size_t>(ranks)) {
    return InvalidFields(v1::REASON_INVALID_REQUEST,
                         {{"--ranks", fmt::format("is {}, but CUDA_VISIBLE_DEVICES={} names {} GPUs; each rank needs one", ranks,
                                                  list, devices.size())}});
  }
  devices.resize(static_cast<size_t>(ranks));
  return devices;
}

absl::StatusOr<BenchReport> RunBench(const v1::JobSpec& spec, const std::function<void(const v1::RankRecord&)>& on_record) {
  std::atomic<bool> stop{false};
  const Interrupt interrupt([&stop](int) { stop = true; }, {SIGINT, SIGTERM, SIGHUP});
  const TemporaryDirectory directory;
  if (directory.path().empty()) {
    return Failed(v1::REASON_SPAWN_FAILED, "cannot make a temporary directory; TMPDIR names the place for it, else it is /tmp");
  }
  BenchReport report;
  Ranks ranks;  // After the directory: gone before it.
  MB_RETURN_IF_ERROR(ranks.Start(spec, directory.path()));
  RecordReader events(ranks.first().events);
  std::optional<Clock::time_point> failed_at;
  for (bool running = true; running;) {
    running = ranks.Reap();
    for (const v1::RankRecord& record : events.Next()) {
      if (record.has_started()) report.started = record.started();
      if (record.has_finished()) report.result = record.finished();
      if (record.metric().kind() == v1::METRIC_KIND_TRAIN) report.points.push_back(record.metric());
      on_record(record);
    }
    if (ranks.failed() && !failed_at) failed_at = Clock::now();
    report.interrupted |= stop;
    if (report.interrupted || (failed_at && Clock::now() - *failed_at > kPeersMayEnd)) ranks.Kill();
    if (running) std::this_thread::sleep_for(kPollInterval);
  }
  if (report.interrupted) return report;
  if (ranks.failed()) return ranks.Why();
  report.most_resident_bytes = ranks.first().most_resident_bytes;
  return report;
}

}  // namespace mbridge::mbctl
