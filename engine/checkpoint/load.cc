#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "engine/checkpoint/agreement.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/core/device.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

bool IsOptimizerState(const std::string& name) { return name.starts_with(kOptimizerStatePrefix); }

absl::Status Mismatch(std::string_view message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG, message);
}

absl::Status CheckTarget(const CheckpointTensor& target, const ManifestTensor& saved, bool weights_only) {
  if (const std::string problem = CheckPart(PartOf(target)); !problem.empty()) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, fmt::format("tensor {}: {}", target.name, problem));
  }
  if (saved.shape != target.global_shape) {
    return Mismatch(fmt::format(
        "tensor {} has shape {} in the checkpoint and {} in this model; the model keys must be those of the checkpoint",
        target.name, saved.shape.ToString(), target.global_shape.ToString()));
  }
  if (saved.dtype != target.tensor.dtype && !(weights_only && CanConvert(saved.dtype, target.tensor.dtype))) {
    return Mismatch(fmt::format(
        "tensor {} is {} in the checkpoint and {} in this model; use the same mixed_precision or load the weights only",
        target.name, NameOf(saved.dtype), NameOf(target.tensor.dtype)));
  }
  return absl::OkStatus();
}

absl::Status LoadTensor(ShardReader& reader, const ManifestTensor& saved, const CheckpointTensor& target) {
  const Tensor& tensor = target.tensor;
  if (tensor.device == DeviceType::kCpu) return ReadPart(reader, saved, PartOf(target), tensor.dtype, tensor.data);
  std::vector<char> memory(tensor.bytes());
  MB_RETURN_IF_ERROR(ReadPart(reader, saved, PartOf(target), tensor.dtype, memory.data()));
  Device& device = DeviceOf(tensor.device);
  device.CopyToDevice({.device = tensor.device}, tensor.data, memory.data(), memory.size());
  device.Synchronize({.device = tensor.device});
  return absl::OkStatus();
}

// Loads this rank's tensors; `used` gets 1 for each tensor of the manifest that was asked for.
absl::Status LoadMine(const std::string& path, const Manifest& manifest, const LoadOptions& options,
                      const std::vector<CheckpointTensor>& into, std::vector<int64_t>& used) {
  if (!options.weights_only && !manifest.meta.has_optimizer_state) {
    return Mismatch(fmt::format("{} holds no optimizer state; fork from its weights only", path));
  }
  std::map<std::string_view, size_t> index;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) index[manifest.tensors[i].name] = i;
  ShardReader reader(path, manifest);
  for (const CheckpointTensor& target : into) {
    if (options.weights_only && IsOptimizerState(target.name)) continue;
    const auto found = index.find(target.name);
    if (found == index.end()) {
      return Mismatch(fmt::format(
          "the checkpoint {} has no tensor {} (shape {} in this model); the model keys must be those of the checkpoint", path,
          target.name, target.global_shape.ToString()));
    }
    used[found->second] = 1;
    MB_RETURN_IF_ERROR(CheckTarget(target, manifest.tensors[found->second], options.weights_only));
    MB_RETURN_IF_ERROR(LoadTensor(reader, manifest.tensors[found->second], target));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointMeta> LoadCheckpoint(const std::string& path, const LoadOptions& options,
                                              const std::vector<CheckpointTensor>& into, Communicator* world) {
  absl::StatusOr<ManifestWithHash> read = ReadManifest(path, options.expected_manifest_hash);
  MB_RETURN_IF_ERROR(Agree(read.status(), world));
  const Manifest& manifest = read->manifest;
  std::vector<int64_t> used(manifest.tensors.size(), 0);
  MB_RETURN_IF_ERROR(Agree(LoadMine(path, manifest, options, into, used), world));
  if (!used.empty())
    world->AllReduce({used.data(), DType::kI64, DeviceType::kCpu, {static_cast<int64_t>(used.size())}}, ReduceOp::kMax);
  for (size_t i = 0; i < used.size(); ++i) {
    const ManifestTensor& tensor = manifest.tensors[i];
    if (used[i] != 0 || (options.weights_only && IsOptimizerState(tensor.name))) continue;
    return Mismatch(fmt::format(
        "the checkpoint {} has a tensor {} of shape {} that this model lacks; the model keys must be those of the checkpoint",
        path, tensor.name, tensor.shape.ToString()));
  }
  return manifest.meta;
}

absl::StatusOr<CheckpointMeta> ReadCheckpointMeta(const std::string& path, const std::string& expected_manifest_hash) {
  MB_ASSIGN_OR_RETURN(ManifestWithHash read, ReadManifest(path, expected_manifest_hash));
  return std::move(read.manifest.meta);
}

absl::StatusOr<VerifyResult> VerifyCheckpoint(const std::string& path, const std::string& expected_manifest_hash) {
  MB_ASSIGN_OR_RETURN(const ManifestWithHash read, ReadManifest(path, expected_manifest_hash));
  const Manifest& manifest = read.manifest;
  VerifyResult result{read.bytes, static_cast<int>(manifest.tensors.size()), read.hash};
  ShardReader reader(path, manifest);
  std::map<std::string, int64_t> listed;  // Bytes of each file that the manifest accounts for.
  for (const ManifestFile& file : manifest.files) {
    MB_RETURN_IF_ERROR(reader.CheckHeader(file));
    listed[file.name] = file.header_bytes;
    result.bytes += file.bytes;
  }
  for (const ManifestTensor& tensor : manifest.tensors) {
    std::vector<Part> parts;
    for (const ManifestShard& shard : tensor.shards) {
      MB_RETURN_IF_ERROR(reader.Check(tensor, shard));
      listed[shard.file] += shard.bytes;
      parts.push_back(shard.part);
    }
    if (const std::string problem = CheckCoverage(parts); !problem.empty()) {
      return CorruptCheckpoint(fmt::format("{}/{}: tensor {}: {}", path, kManifestName, tensor.name, problem));
    }
  }
  for (const ManifestFile& file : manifest.files) {
    if (listed[file.name] != file.bytes) {
      return CorruptCheckpoint(
          fmt::format("{}/{}: {} of the {} bytes are listed in the manifest", path, file.name, listed[file.name], file.bytes));
    }
  }
  return result;
}

}  // namespace mbridge
