#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "engine/checkpoint/agreement.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/shard_file.h"
#include "engine/core/failpoint.h"
#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

void AppendCheckpointTensors(const std::string& name, const ParameterSpec& spec, const Tensor& tensor, int64_t flat_begin,
                             bool write_here, std::vector<CheckpointTensor>* tensors) {
  const int axis = spec.shard_axis;
  if (axis < 0 || spec.stripes.empty()) {
    tensors->push_back(
        {name, spec.global_shape, spec.shape, axis, axis < 0 ? 0 : spec.shard_begin, flat_begin, tensor, write_here});
    return;
  }
  if (axis != 0) ThrowEngineError("tensor {}: stripes of axis {}", name, axis);
  const int64_t ranks = spec.global_shape[0] / spec.shape[0], rank = spec.shard_begin / spec.stripes[0];
  const int64_t row = spec.shape.NumElements() / spec.shape[0], end = flat_begin + tensor.size();
  const Tensor flat = tensor.View({tensor.size()});
  int64_t above = 0;  // Rows of the stripes before, of this rank.
  for (const int64_t rows : spec.stripes) {
    Shape stripe = spec.shape;
    stripe[0] = rows;
    const int64_t begin = above * row, first = std::max(flat_begin, begin), last = std::min(end, begin + rows * row);
    if (first < last) {
      Tensor part = flat.Rows(first - flat_begin, last - first);
      if (part.size() == rows * row) part = part.View(stripe);
      tensors->push_back({name, spec.global_shape, stripe, 0, above * ranks + rank * rows, first - begin, part, write_here});
    }
    above += rows;
  }
}

absl::Status RemoveUnfinishedCheckpoints(const std::string& parent_directory) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(parent_directory, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with(kTemporaryPrefix)) continue;
    MB_RETURN_IF_ERROR(AsCheckpointStatus(RemoveAll(it->path()), false));
  }
  if (!error || error == std::errc::no_such_file_or_directory) return absl::OkStatus();
  return AsCheckpointStatus(FileError(error.value(), "list", parent_directory), false);
}

namespace {

// Room for headers, manifest and the file system's own records.
constexpr int64_t kSlackBytes = int64_t{1} << 20;
constexpr int64_t kSlackBytesPerTensor = 1024;

absl::Status CheckTensors(const CheckpointMeta& meta, const std::vector<const CheckpointTensor*>& tensors) {
  if (!nlohmann::json::parse(meta.state_json, nullptr, false).is_object()) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, "the training state to save is not a JSON object");
  }
  for (const CheckpointTensor* entry : tensors) {
    if (const std::string problem = CheckPart(PartOf(*entry)); !problem.empty()) {
      return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, fmt::format("tensor {}: {}", entry->name, problem));
    }
  }
  return absl::OkStatus();
}

struct Paths {
  std::string final;
  std::string parent;
  std::string temporary;
};

// Rank 0: an empty temporary folder on a disk with enough room.
absl::Status Prepare(const Paths& paths, int64_t needed_bytes) {
  MB_RETURN_IF_ERROR(MakeDirectories(paths.parent));
  MB_RETURN_IF_ERROR(RemoveUnfinishedCheckpoints(paths.parent));
  if (std::error_code error; std::filesystem::exists(paths.final, error) || error) {
    return MakeStatus(absl::StatusCode::kAlreadyExists, v1::REASON_CHECKPOINT_IO_ERROR,
                      fmt::format("{} exists already", paths.final));
  }
  MB_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeDiskBytes(paths.parent));
  if (free_bytes < needed_bytes) {
    return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_DISK_FULL,
                      fmt::format("a checkpoint needs {} bytes, {} has {} free", needed_bytes, paths.parent, free_bytes));
  }
  MB_RETURN_IF_ERROR(MakeDirectories(paths.temporary));
  MB_FAILPOINT("checkpoint.after_mkdir");
  return absl::OkStatus();
}

// One manifest of what all ranks wrote; every tensor is whole.
absl::StatusOr<Manifest> Merge(const CheckpointMeta& meta, const std::vector<std::string>& parts) {
  Manifest merged;
  merged.meta = meta;
  merged.world_size = static_cast<int>(parts.size());
  std::map<std::string, size_t> index;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    MB_ASSIGN_OR_RETURN(Manifest part, ParseManifest(parts[rank], fmt::format("the list of rank {}", rank)));
    std::move(part.files.begin(), part.files.end(), std::back_inserter(merged.files));
    for (ManifestTensor& tensor : part.tensors) {
      const auto [it, is_new] = index.emplace(tensor.name, merged.tensors.size());
      if (is_new) {
        merged.tensors.push_back(std::move(tensor));
        continue;
      }
      ManifestTensor& known = merged.tensors[it->second];
      if (known.dtype != tensor.dtype) {
        return MakeStatus(
            absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
            fmt::format("tensor {} is {} on one rank and {} on another", tensor.name, NameOf(known.dtype), NameOf(tensor.dtype)));
      }
      std::move(tensor.shards.begin(), tensor.shards.end(), std::back_inserter(known.shards));
    }
  }
  for (const ManifestTensor& tensor : merged.tensors) {
    std::vector<Part> tensor_parts;
    for (const ManifestShard& shard : tensor.shards) tensor_parts.push_back(shard.part);
    if (const std::string problem = CheckCoverage(tensor_parts); !problem.empty()) {
      return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, fmt::format("tensor {}: {}", tensor.name, problem));
    }
  }
  return merged;
}

// Rank 0, after every shard is on the disk: manifest, then the folder gets its name.
absl::StatusOr<SavedCheckpoint> Commit(const Paths& paths, const CheckpointMeta& meta, const std::vector<std::string>& parts) {
  MB_ASSIGN_OR_RETURN(const Manifest manifest, Merge(meta, parts));
  const std::string text = ToJson(manifest);
  MB_FAILPOINT("checkpoint.before_manifest");
  MB_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(fmt::format("{}/{}", paths.temporary, kManifestName)));
  MB_RETURN_IF_ERROR(writer.Write(text));
  MB_RETURN_IF_ERROR(writer.SyncAndClose());
  MB_RETURN_IF_ERROR(SyncDirectory(paths.temporary));
  if (const int injected = MB_FAILPOINT("checkpoint.before_rename"); injected != 0)
    return FileError(injected, "rename to", paths.final);
  MB_RETURN_IF_ERROR(RenameDurably(paths.temporary, paths.final));
  MB_FAILPOINT("checkpoint.after_rename");
  SavedCheckpoint saved{paths.final, static_cast<int64_t>(text.size()), static_cast<int>(manifest.tensors.size()),
                        HashText(HashOf(text))};
  for (const ManifestFile& file : manifest.files) saved.bytes += file.bytes;
  return saved;
}

// What rank 0 made, on every rank.
SavedCheckpoint Share(const SavedCheckpoint& saved, Communicator* world) {
  std::array<int64_t, 3> numbers = {saved.bytes, saved.tensors, 0};
  if (!saved.manifest_hash.empty()) numbers[2] = static_cast<int64_t>(std::stoull(saved.manifest_hash, nullptr, 16));
  world->Broadcast({numbers.data(), DType::kI64, DeviceType::kCpu, {3}}, 0);
  return {saved.path, numbers[0], static_cast<int>(numbers[1]), HashText(static_cast<uint64_t>(numbers[2]))};
}

}  // namespace

absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& final_path, const CheckpointMeta& meta,
                                               const std::vector<CheckpointTensor>& tensors, Communicator* world) {
  std::string trimmed = final_path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  const std::string name = std::filesystem::path(trimmed).filename();
  const Paths paths{trimmed, ParentDirectory(trimmed), fmt::format("{}/{}{}", ParentDirectory(trimmed), kTemporaryPrefix, name)};
  const bool first = world->rank() == 0;

  std::vector<const CheckpointTensor*> mine;
  int64_t bytes = kSlackBytes;
  for (const CheckpointTensor& tensor : tensors) {
    if (!tensor.write_here) continue;
    mine.push_back(&tensor);
    bytes += static_cast<int64_t>(tensor.tensor.bytes()) + kSlackBytesPerTensor;
  }
  MB_RETURN_IF_ERROR(Agree(CheckTensors(meta, mine), world));
  world->AllReduce({&bytes, DType::kI64, DeviceType::kCpu, {1}}, ReduceOp::kSum);
  // Before this point nothing of ours is on the disk, so that an error here removes nothing.
  MB_RETURN_IF_ERROR(Agree(first ? AsCheckpointStatus(Prepare(paths, bytes), false) : absl::OkStatus(), world));

  const auto fail = [&](const absl::Status& status) {
    if (first) RemoveAll(paths.temporary).IgnoreError();  // The first error is the one to report.
    return status;
  };
  Manifest part;
  absl::Status written;
  if (!mine.empty()) {
    absl::StatusOr<Manifest> result =
        WriteShardFile(paths.temporary, fmt::format("rank_{:05}.safetensors", world->rank()), meta, mine);
    if (result.ok())
      part = *std::move(result);
    else
      written = AsCheckpointStatus(result.status(), false);
  }
  if (absl::Status status = Agree(written, world); !status.ok()) return fail(status);
  MB_FAILPOINT("checkpoint.after_shards");

  const std::vector<std::string> parts = GatherTexts(ToJson(part), world);
  SavedCheckpoint saved{paths.final, 0, 0, ""};
  absl::Status committed;
  if (first) {
    absl::StatusOr<SavedCheckpoint> result = Commit(paths, meta, parts);
    if (result.ok())
      saved = *std::move(result);
    else
      committed = AsCheckpointStatus(result.status(), false);
  }
  if (absl::Status status = Agree(committed, world); !status.ok()) return fail(status);
  return Share(saved, world);
}

}  // namespace mbridge
