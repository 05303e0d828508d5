#include "server/nodes/rank_specs.h"

#include <filesystem>

namespace mbridge::server {

std::string CheckpointDirectory(const v1::Job& job) { return job.run_directory() + "/checkpoints"; }

bool IsBeneath(const std::string& path, const std::string& root) {
  namespace fs = std::filesystem;
  const fs::path wanted(path);
  if (!wanted.is_absolute() || path.find('\0') != std::string::npos) return false;
  for (const auto& part : wanted) {
    if (part == "..") return false;
  }
  // Symbolic links count as what they lead to; parts that do not exist yet stay as they are.
  std::error_code error;
  const fs::path real = fs::weakly_canonical(wanted, error);
  if (error) return false;
  const fs::path real_root = fs::weakly_canonical(root, error);
  if (error) return false;
  const fs::path relative = real.lexically_relative(real_root);
  return !relative.empty() && *relative.begin() != "..";
}

v1::Device DeviceOf(const v1::Attempt& attempt) {
  return attempt.placement_size() > 0 && !attempt.placement(0).gpu_uuid().empty() ? v1::DEVICE_CUDA : v1::DEVICE_CPU;
}

v1::RankSpec MakeRankSpec(const v1::Job& job, const v1::Attempt& attempt, const v1::RankPlacement& place,
                          const v1::ResolvedConfig& resolved, const v1::Checkpoint* source, const std::string& build_id) {
  v1::RankSpec spec;
  spec.set_job_id(job.job_id());
  spec.set_attempt(attempt.attempt());
  spec.set_run_name(job.run_name());
  spec.set_rank(place.rank());
  spec.set_world_size(attempt.placement_size());
  spec.set_local_rank(place.local_rank());
  spec.set_threads(place.threads());
  spec.set_device(place.gpu_uuid().empty() ? v1::DEVICE_CPU : v1::DEVICE_CUDA);
  spec.set_gpu_uuid(place.gpu_uuid());
  *spec.mutable_resolved() = resolved;
  spec.set_checkpoint_directory(CheckpointDirectory(job));
  if (source != nullptr) {
    spec.set_load_checkpoint_path(source->path());
    spec.set_expected_manifest_hash(source->manifest_hash());
    // A restart of the fork goes on from the fork's own checkpoint, optimizer and all.
    spec.set_load_weights_only(job.spec().start().weights_only() && source->job_id() != job.job_id());
  }
  spec.set_build_id(build_id);
  if (job.spec().has_convert()) *spec.mutable_convert() = job.spec().convert();
  return spec;
}

}  // namespace mbridge::server
