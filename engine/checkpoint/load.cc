#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include <fmt/format.h>

#include "engine/checkpoint/agreement.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/manifest.h"
#include "engine/core/device.h"
#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr size_t kReadChunk = size_t{4} << 20;

bool IsOptimizerState(const std::string& name) { return name.starts_with(kOptimizerStatePrefix); }

absl::Status Mismatch(std::string_view message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG, message);
}

bool IsFloat(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

template <class From, class To> void ConvertLoop(const void* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<To*>(to)[i] = FromFloat<To>(ToFloat(static_cast<const From*>(from)[i]));
}

template <class From> void ConvertFrom(const void* from, DType to_type, void* to, int64_t count) {
  if (to_type == DType::kF32)
    ConvertLoop<From, float>(from, to, count);
  else if (to_type == DType::kBF16)
    ConvertLoop<From, BFloat16>(from, to, count);
  else
    ConvertLoop<From, Float16>(from, to, count);
}

void Convert(DType from_type, const void* from, DType to_type, void* to, int64_t count) {
  if (from_type == DType::kF32)
    ConvertFrom<float>(from, to_type, to, count);
  else if (from_type == DType::kBF16)
    ConvertFrom<BFloat16>(from, to_type, to, count);
  else
    ConvertFrom<Float16>(from, to_type, to, count);
}

// Opens the files of a checkpoint once each and checks what is read from them.
class ShardReader {
 public:
  ShardReader(const std::string& checkpoint, const Manifest& manifest) : checkpoint_(checkpoint) {
    for (const ManifestFile& file : manifest.files) sizes_[file.name] = file.bytes;
  }

  absl::StatusOr<const FileReader*> Open(const std::string& name) {
    auto& reader = readers_[name];
    if (reader == nullptr) {
      absl::StatusOr<FileReader> opened = FileReader::Open(checkpoint_ + "/" + name);
      if (!opened.ok()) return AsCheckpointStatus(opened.status(), true);
      if (opened->size() != sizes_.at(name)) {
        return CorruptCheckpoint(
            fmt::format("{} has {} bytes, {} were written", opened->path(), opened->size(), sizes_.at(name)));
      }
      reader = std::make_unique<FileReader>(*std::move(opened));
    }
    return reader.get();
  }

  // The shard's bytes, whole; DATA_LOSS names file and tensor.
  absl::Status Read(const ManifestTensor& tensor, const ManifestShard& shard, void* into) {
    MB_ASSIGN_OR_RETURN(const FileReader* reader, Open(shard.file));
    Checksum checksum;
    for (int64_t done = 0; done < shard.bytes;) {
      const size_t chunk = static_cast<size_t>(std::min<int64_t>(kReadChunk, shard.bytes - done));
      char* to = static_cast<char*>(into) + done;
      MB_RETURN_IF_ERROR(AsCheckpointStatus(reader->ReadAt(shard.offset + done, to, chunk), true));
      checksum.Update(to, chunk);
      done += static_cast<int64_t>(chunk);
    }
    return Compare(tensor, shard, checksum.Value(), reader->path());
  }

  // As Read, without keeping the bytes.
  absl::Status Check(const ManifestTensor& tensor, const ManifestShard& shard) {
    MB_ASSIGN_OR_RETURN(const FileReader* reader, Open(shard.file));
    absl::StatusOr<uint64_t> hash = HashRange(*reader, shard.offset, shard.bytes);
    if (!hash.ok()) return AsCheckpointStatus(hash.status(), true);
    return Compare(tensor, shard, *hash, reader->path());
  }

  absl::Status CheckHeader(const ManifestFile& file) {
    MB_ASSIGN_OR_RETURN(const FileReader* reader, Open(file.name));
    absl::StatusOr<uint64_t> hash = HashRange(*reader, 0, file.header_bytes);
    if (!hash.ok()) return AsCheckpointStatus(hash.status(), true);
    if (*hash != file.header_hash)
      return CorruptCheckpoint(fmt::format("{}: the header has checksum {}, written was {}", reader->path(), HashText(*hash),
                                           HashText(file.header_hash)));
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<uint64_t> HashRange(const FileReader& reader, int64_t offset, int64_t bytes) {
    buffer_.resize(kReadChunk);
    Checksum checksum;
    for (int64_t done = 0; done < bytes;) {
      const size_t chunk = static_cast<size_t>(std::min<int64_t>(kReadChunk, bytes - done));
      MB_RETURN_IF_ERROR(reader.ReadAt(offset + done, buffer_.data(), chunk));
      checksum.Update(buffer_.data(), chunk);
      done += static_cast<int64_t>(chunk);
    }
    return checksum.Value();
  }

  static absl::Status Compare(const ManifestTensor& tensor, const ManifestShard& shard, uint64_t hash, const std::string& path) {
    if (hash == shard.hash) return absl::OkStatus();
    return CorruptCheckpoint(
        fmt::format("{}: tensor {} has checksum {}, written was {}", path, tensor.name, HashText(hash), HashText(shard.hash)));
  }

  std::string checkpoint_;
  std::map<std::string, int64_t> sizes_;
  std::map<std::string, std::unique_ptr<FileReader>> readers_;
  std::vector<char> buffer_;
};

absl::Status CheckTarget(const CheckpointTensor& target, const ManifestTensor& saved, bool weights_only) {
  if (const std::string problem = CheckPart(PartOf(target)); !problem.empty()) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, fmt::format("tensor {}: {}", target.name, problem));
  }
  if (saved.shape != target.global_shape) {
    return Mismatch(fmt::format(
        "tensor {} has shape {} in the checkpoint and {} in this model; the model keys must be those of the checkpoint",
        target.name, saved.shape.ToString(), target.global_shape.ToString()));
  }
  if (saved.dtype != target.tensor.dtype && !(weights_only && IsFloat(saved.dtype) && IsFloat(target.tensor.dtype))) {
    return Mismatch(fmt::format(
        "tensor {} is {} in the checkpoint and {} in this model; use the same mixed_precision or load the weights only",
        target.name, NameOf(saved.dtype), NameOf(target.tensor.dtype)));
  }
  return absl::OkStatus();
}

absl::Status LoadHostTensor(ShardReader& reader, const ManifestTensor& saved, const CheckpointTensor& target) {
  const Part want = PartOf(target);
  const DType type = target.tensor.dtype;
  std::vector<char> buffer, converted;
  int64_t filled = 0;
  for (const ManifestShard& shard : saved.shards) {
    if (shard.part == want && saved.dtype == type) {
      MB_RETURN_IF_ERROR(reader.Read(saved, shard, target.tensor.data));
      filled += want.count;
      continue;
    }
    if (!Overlaps(shard.part, want)) continue;
    buffer.resize(static_cast<size_t>(shard.bytes));
    MB_RETURN_IF_ERROR(reader.Read(saved, shard, buffer.data()));
    const void* source = buffer.data();
    if (saved.dtype != type) {
      converted.resize(static_cast<size_t>(shard.part.count) * SizeOf(type));
      Convert(saved.dtype, buffer.data(), type, converted.data(), shard.part.count);
      source = converted.data();
    }
    filled += CopyOverlap(shard.part, source, want, target.tensor.data, SizeOf(type));
  }
  if (filled != want.count)
    return CorruptCheckpoint(
        fmt::format("tensor {}: the checkpoint holds {} of the {} elements needed", saved.name, filled, want.count));
  return absl::OkStatus();
}

absl::Status LoadTensor(ShardReader& reader, const ManifestTensor& saved, const CheckpointTensor& target) {
  const Tensor& tensor = target.tensor;
  if (tensor.device == DeviceType::kCpu) return LoadHostTensor(reader, saved, target);
  std::vector<char> memory(tensor.bytes());
  CheckpointTensor on_host = target;
  on_host.tensor = {memory.data(), tensor.dtype, DeviceType::kCpu, tensor.shape};
  MB_RETURN_IF_ERROR(LoadHostTensor(reader, saved, on_host));
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
