#include "worker/agent/node_tasks.h"

#include <signal.h>
#include <sys/wait.h>

#include <filesystem>

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <spdlog/spdlog.h>
#include <xxhash.h>

#include "proto/rpc/status_details.h"
#include "worker/agent/checkpoint_removal.h"
#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

constexpr size_t kErrorTail = 1000;

v1::TaskResult Failure(const std::string& task_id, v1::Reason reason, const std::string& detail) {
  v1::TaskResult result;
  result.set_task_id(task_id);
  result.set_reason(reason);
  result.set_detail(detail);
  return result;
}

v1::TaskResult Remove(const std::string& task_id, const std::string& path) {
  const absl::StatusOr<int64_t> bytes = RemoveCheckpoint(path);
  if (!bytes.ok()) return Failure(task_id, v1::REASON_CHECKPOINT_IO_ERROR, std::string(bytes.status().message()));
  v1::TaskResult result;
  result.set_task_id(task_id);
  result.set_ok(true);
  result.set_bytes(*bytes);
  return result;
}

// Protobuf strings must be UTF-8; what a program prints may be anything.
std::string Printable(std::string text) {
  for (char& byte : text) {
    const auto value = static_cast<unsigned char>(byte);
    if ((value < 0x20 && byte != '\n') || value >= 0x7f) byte = '?';
  }
  return text;
}

std::string ErrorTail(const std::string& path) {
  std::string text = spool::ReadFile(path).value_or("");
  if (text.size() > kErrorTail) text.erase(0, text.size() - kErrorTail);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return Printable(std::move(text));
}

void TakePreflight(const std::string& output, v1::TaskResult* result) {
  if (!result->mutable_preflight()->ParseFromString(output)) {
    result->clear_preflight();
    result->set_reason(v1::REASON_ENGINE_ERROR);
    result->set_detail("the preflight wrote no readable result");
    return;
  }
  result->set_ok(result->preflight().problems().empty());
  if (result->ok()) return;
  result->set_reason(result->preflight().problems(0).reason());
  result->set_detail(result->preflight().problems(0).description());
}

void TakeVerify(const std::string& output, v1::TaskResult* result) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  v1::TaskResult parsed;
  if (google::protobuf::util::JsonStringToMessage(output, &parsed, options).ok()) {
    parsed.set_task_id(result->task_id());
    *result = std::move(parsed);
  } else {
    result->set_reason(v1::REASON_ENGINE_ERROR);
    result->set_detail("the verification wrote no readable result: " + Printable(output.substr(0, kErrorTail)));
  }
}

}  // namespace

NodeTasks::NodeTasks(std::string directory, const Programs& programs, TaskLimits limits)
    : directory_(std::move(directory)), programs_(programs), limits_(limits) {
  std::error_code ignored;  // What cannot be made here is reported by the first task.
  std::filesystem::remove_all(directory_, ignored);
  std::filesystem::create_directories(directory_, ignored);
}

NodeTasks::~NodeTasks() {
  for (const auto& [id, process] : processes_) ::kill(process.pid, SIGKILL);
}

void NodeTasks::Add(const v1::NodeTask& task, TimePoint now, Children* children) {
  const std::string& id = task.task_id();
  if (processes_.count(id) > 0 || removals_.count(id) > 0 || results_.count(id) > 0) return;
  switch (task.what_case()) {
    case v1::NodeTask::kPreflight:
    case v1::NodeTask::kVerify: return StartProcess(task, now, children);
    case v1::NodeTask::kDelete: removals_[id] = std::async(std::launch::async, Remove, id, task.delete_().path()); return;
    default: results_[id] = Failure(id, v1::REASON_SPAWN_FAILED, "this agent does not know the task; its version is older");
  }
}

void NodeTasks::StartProcess(const v1::NodeTask& task, TimePoint now, Children* children) {
  const std::string& id = task.task_id();
  Process process;
  process.task = task;
  process.files = fmt::format("{}/{:016x}", directory_, XXH3_64bits(id.data(), id.size()));
  std::vector<std::string> arguments;
  absl::Status status;
  if (task.has_preflight()) {
    const v1::RankSpec& spec = task.preflight().spec();
    process.deadline = now + limits_.preflight;
    status = spool::WriteProto(process.files + ".spec", spec);
    arguments = {spec.device() == v1::DEVICE_CUDA ? programs_.cuda_rank : programs_.rank, "--preflight", "--spec",
                 process.files + ".spec"};
  } else {
    process.deadline = now + limits_.verify;
    arguments = {programs_.rank, "--verify", task.verify().path(), "--manifest-hash", task.verify().manifest_hash()};
  }
  if (status.ok()) {
    const absl::StatusOr<pid_t> pid = children->Spawn({arguments, process.files + ".out", process.files + ".err"});
    status = pid.status();
    if (pid.ok()) process.pid = *pid;
  }
  if (status.ok()) {
    processes_[id] = std::move(process);
  } else {
    results_[id] = Failure(id, v1::REASON_SPAWN_FAILED, std::string(status.message()));
  }
}

v1::TaskResult NodeTasks::ResultOf(const Process& process, int wait_status) const {
  const std::string& id = process.task.task_id();
  const char* name = process.task.has_preflight() ? "preflight" : "verification";
  if (process.timed_out) return Failure(id, v1::REASON_ENGINE_ERROR, fmt::format("the {} took too long and was ended", name));
  if (!WIFEXITED(wait_status) || WEXITSTATUS(wait_status) != 0) {
    const std::string how = WIFSIGNALED(wait_status) ? fmt::format("signal {}", WTERMSIG(wait_status))
                                                     : fmt::format("exit code {}", WEXITSTATUS(wait_status));
    return Failure(id, v1::REASON_ENGINE_ERROR,
                   fmt::format("the {} ended with {}: {}", name, how, ErrorTail(process.files + ".err")));
  }
  const absl::StatusOr<std::string> output = spool::ReadFile(process.files + ".out");
  if (!output.ok()) return Failure(id, v1::REASON_ENGINE_ERROR, std::string(output.status().message()));
  v1::TaskResult result;
  result.set_task_id(id);
  process.task.has_preflight() ? TakePreflight(*output, &result) : TakeVerify(*output, &result);
  return result;
}

void NodeTasks::Tick(TimePoint now, Children* children) {
  for (auto it = processes_.begin(); it != processes_.end();) {
    Process& process = it->second;
    if (const std::optional<int> status = children->TakeEnd(process.pid)) {
      results_[it->first] = ResultOf(process, *status);
      for (const char* extension : {".spec", ".out", ".err"}) std::filesystem::remove(process.files + extension);
      it = processes_.erase(it);
      continue;
    }
    if (now > process.deadline && !process.timed_out) {
      process.timed_out = true;
      ::kill(process.pid, SIGKILL);  // Our child and not reaped yet: the pid is its own.
    }
    ++it;
  }
  for (auto it = removals_.begin(); it != removals_.end();) {
    if (it->second.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      ++it;
      continue;
    }
    results_[it->first] = it->second.get();
    it = removals_.erase(it);
  }
}

void NodeTasks::FillResults(v1::SyncRequest* request) const {
  for (const auto& [id, result] : results_) *request->add_results() = result;
}

}  // namespace mbridge::agent
