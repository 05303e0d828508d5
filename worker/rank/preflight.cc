#include "worker/rank/preflight.h"

#include <google/protobuf/text_format.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/checkpoint/checkpoint.h"
#include "engine/core/file.h"
#include "engine/core/gpu_architectures.h"
#include "engine/data/gpt_data.h"
#include "engine/train/training_plan.h"
#include "proto/rpc/status_details.h"
#include "worker/rank/convert_command.h"
#include "worker/rank/rank_run.h"
#include "worker/spool/file.h"

namespace mbridge {
namespace {

void AddProblem(v1::PreflightResult* result, v1::Reason reason, const std::string& field, const std::string& description) {
  auto* problem = result->add_problems();
  problem->set_reason(reason);
  problem->set_field(field);
  problem->set_description(description);
}

// Memory that new processes can use, from /proc/meminfo.
int64_t AvailableMemory() {
  std::ifstream info("/proc/meminfo");
  std::string name, unit;
  int64_t kilobytes = 0;
  while (info >> name >> kilobytes >> unit) {
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return 0;
}

// The nearest folder above `path` that exists.
std::string ExistingParent(std::filesystem::path path) {
  std::error_code error;
  while (!path.empty() && path != path.root_path() && !std::filesystem::exists(path, error)) path = path.parent_path();
  return path.string();
}

void CheckData(const TrainingPlan& plan, v1::PreflightResult* result) {
  std::vector<std::string> facts;
  GptDataConfig data = plan.data;
  data.write_cache = false;
  const absl::Status status = CheckGptData(data, &facts);
  for (const std::string& fact : facts) result->add_facts(fact);
  if (status.ok()) return;
  const bool missing = status.code() == absl::StatusCode::kNotFound;
  AddProblems(status, "dataset.data_path", missing ? v1::REASON_DATA_NOT_FOUND : v1::REASON_DATA_ERROR, result);
}

// A longer training may need another number of epochs, and so put all samples in another order.
void CheckOrder(const v1::RankSpec& spec, const TrainingPlan& plan, const CheckpointMeta& meta, v1::PreflightResult* result) {
  v1::ResolvedConfig before = spec.resolved();
  if (!google::protobuf::TextFormat::ParseFromString(meta.config_text, before.mutable_config())) return;
  const auto old_plan = MakeTrainingPlan(before);
  if (!old_plan.ok()) return;
  const auto changes = OrderChanges(old_plan->data, plan.data);
  if (!changes.ok()) return;  // Data of now are checked by themselves.
  for (const std::string& change : *changes) {
    result->add_warnings(
        fmt::format("{}: the samples come in another order than the checkpoint's from the first one on. "
                    "train.exit_interval and mbctl cancel end a run early without that",
                    change));
  }
}

void CheckCheckpoint(const v1::RankSpec& spec, const TrainingPlan& plan, v1::PreflightResult* result) {
  if (spec.load_checkpoint_path().empty()) return;
  const auto meta = ReadCheckpointMeta(spec.load_checkpoint_path(), spec.expected_manifest_hash());
  if (!meta.ok()) {
    AddProblems(meta.status(), "start.checkpoint_id", v1::REASON_CHECKPOINT_CORRUPT, result);
    return;
  }
  result->add_facts(fmt::format("{}: iteration {}, {} samples", spec.load_checkpoint_path(), meta->step, meta->consumed_samples));
  if (!spec.load_weights_only()) CheckOrder(spec, plan, *meta, result);
}

// Before the GPU is taken: its first kernel would end the job.
void CheckGpu(const v1::RankSpec& spec, v1::PreflightResult* result) {
  if (spec.device() != v1::DEVICE_CUDA) return;
  const std::string why = WhyNoKernels(spec.gpu().name(), spec.gpu().compute_capability(), BuiltGpuArchitectures());
  if (!why.empty()) AddProblem(result, v1::REASON_NOT_ENOUGH_RESOURCES, "spec.device", why);
}

void CheckMemory(const v1::RankSpec& spec, const TrainingPlan& plan, v1::PreflightResult* result) {
  try {
    *result->mutable_memory() = PlanMemory(plan);
  } catch (const EngineError& error) {
    return AddProblem(result, error.reason(), "model", error.what());
  }
  const int64_t free_memory = AvailableMemory();
  result->set_free_memory_bytes(free_memory);
  const bool cuda = plan.device == DeviceType::kCuda;
  const MemoryPlace place =
      cuda ? MemoryPlace{spec.gpu_memory_bytes(), spec.gpus()} : MemoryPlace{free_memory / std::max(1, spec.world_size()), 0};
  if (const std::string why = WhyTooLarge(spec.resolved(), LayoutResolverOf(spec), plan, place); !why.empty()) {
    AddProblem(result, v1::REASON_OUT_OF_MEMORY, plan.micro_batch_size > 1 ? "train.micro_batch_size" : "model",
               fmt::format("{} of this node: {}", cuda ? "the GPUs" : "the memory", why));
  }
}

void CheckDisk(const v1::RankSpec& spec, v1::PreflightResult* result) {
  const int64_t checkpoint = spec.resolved().per_rank().checkpoint_bytes();
  if (spec.checkpoint_directory().empty()) return;
  const std::string parent = ExistingParent(spec.checkpoint_directory());
  std::error_code error;
  if (!std::filesystem::is_directory(parent, error) || ::access(parent.c_str(), W_OK | X_OK) != 0) {
    const std::string why = std::filesystem::is_directory(parent, error) ? "cannot be written to" : "is not a directory";
    AddProblem(result, v1::REASON_CHECKPOINT_IO_ERROR, "checkpoint.save",
               fmt::format("{} cannot hold checkpoints: {} {}. Mend that, or choose another root or run name",
                           spec.checkpoint_directory(), parent, why));
    return;
  }
  const auto free_disk = FreeDiskBytes(parent);
  if (!free_disk.ok()) {
    AddProblems(free_disk.status(), "checkpoint.save", v1::REASON_CHECKPOINT_IO_ERROR, result);
    return;
  }
  result->set_free_disk_bytes(*free_disk);
  if (checkpoint > *free_disk) {
    AddProblem(result, v1::REASON_DISK_FULL, "checkpoint.save",
               fmt::format("a checkpoint takes {} MiB, {} MiB are free under {}. Free space or choose another root",
                           checkpoint >> 20, *free_disk >> 20, spec.checkpoint_directory()));
  }
}

}  // namespace

void AddProblems(const absl::Status& status, const std::string& field, v1::Reason fallback, v1::PreflightResult* result) {
  const v1::Reason reason = ReasonOf(status) == v1::REASON_UNSPECIFIED ? fallback : ReasonOf(status);
  const auto violations = FieldViolationsOf(status);
  for (const FieldViolation& violation : violations) AddProblem(result, reason, violation.field, violation.description);
  if (violations.empty()) AddProblem(result, reason, field, std::string(status.message()));
}

v1::PreflightResult CheckNode(const v1::RankSpec& spec) {
  v1::PreflightResult result;
  if (spec.has_convert()) {
    CheckConversion(spec, &result);
    return result;
  }
  auto plan = MakeTrainingPlan(spec.resolved());
  if (plan.ok()) plan->device = spec.device() == v1::DEVICE_CUDA ? DeviceType::kCuda : DeviceType::kCpu;
  if (!plan.ok()) {
    AddProblems(plan.status(), "config", v1::REASON_INVALID_CONFIG, &result);
    return result;
  }
  CheckGpu(spec, &result);
  CheckData(*plan, &result);
  CheckCheckpoint(spec, *plan, &result);
  CheckMemory(spec, *plan, &result);
  CheckDisk(spec, &result);
  return result;
}

int RunPreflight(const std::string& spec_path) {
  v1::RankSpec spec;
  if (const absl::Status status = spool::ReadProto(spec_path, &spec); !status.ok()) {
    std::fprintf(stderr, "mbrank: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  std::string bytes;
  const v1::RankResult outcome = ResultOf([&] {
    bytes = CheckNode(spec).SerializeAsString();
    v1::RankResult done;
    done.set_reason(v1::REASON_COMPLETED);
    return done;
  });
  if (outcome.reason() != v1::REASON_COMPLETED) {
    v1::PreflightResult failed;
    AddProblem(&failed, outcome.reason(), spec.has_convert() ? "spec.convert" : "config", outcome.detail());
    bytes = failed.SerializeAsString();
  }
  return std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() && std::fflush(stdout) == 0 ? 0 : 1;
}

int RunVerify(const std::string& path, const std::string& manifest_hash) {
  const auto verified = VerifyCheckpoint(path, manifest_hash);
  nlohmann::json line = {{"ok", verified.ok()}};
  if (verified.ok()) {
    line["bytes"] = std::to_string(verified->bytes);  // The JSON form of a protobuf int64.
    line["tensors"] = verified->tensors;
  } else {
    const v1::Reason reason = ReasonOf(verified.status());
    line["reason"] = v1::Reason_Name(reason == v1::REASON_UNSPECIFIED ? v1::REASON_CHECKPOINT_CORRUPT : reason);
    line["detail"] = std::string(verified.status().message());
  }
  std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return 0;  // The check itself worked; its outcome is in the line.
}

}  // namespace mbridge
