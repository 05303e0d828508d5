#include "engine/checkpoint/shard_file.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/host_chunks.h"
#include "engine/core/failpoint.h"
#include "engine/core/file.h"
#include "engine/core/safetensors_writer.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

// The first part of a tensor has its name, further parts also say where they begin.
std::string HeaderOf(const CheckpointMeta& meta, const std::vector<const CheckpointTensor*>& entries) {
  std::vector<SafetensorsTensor> tensors;
  std::set<std::string> names;
  for (const CheckpointTensor* entry : entries) {
    SafetensorsTensor tensor{
        entry->name, std::string(NameOf(entry->tensor.dtype)), {}, static_cast<int64_t>(entry->tensor.bytes())};
    if (!names.insert(tensor.name).second)
      tensor.name = fmt::format("{}@{}.{}", entry->name, entry->shard_begin, entry->flat_begin);
    for (int axis = 0; axis < entry->tensor.shape.rank(); ++axis) tensor.shape.push_back(entry->tensor.shape[axis]);
    tensors.push_back(std::move(tensor));
  }
  return SafetensorsHeader(tensors, {{"format", "mbridge-checkpoint"}, {"step", std::to_string(meta.step)}});
}

template <class T> bool AllFinite(const void* data, size_t bytes) {
  const T* values = static_cast<const T*>(data);
  bool finite = true;
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    if constexpr (std::is_same_v<T, double>)
      finite &= std::isfinite(values[i]);
    else
      finite &= std::isfinite(ToFloat(values[i]));
  }
  return finite;
}

bool AreFinite(DType dtype, const void* data, size_t bytes) {
  switch (dtype) {
    case DType::kF32: return AllFinite<float>(data, bytes);
    case DType::kBF16: return AllFinite<BFloat16>(data, bytes);
    case DType::kF16: return AllFinite<Float16>(data, bytes);
    case DType::kF64: return AllFinite<double>(data, bytes);
    default: return true;
  }
}

// Checks and hashes each stretch while it is in the cache.
absl::StatusOr<uint64_t> WriteHashed(FileWriter& writer, HostChunks* chunks, int64_t step, const CheckpointTensor& entry) {
  Checksum checksum;
  MB_RETURN_IF_ERROR(chunks->ForEach(entry.tensor, [&](const void* data, size_t bytes) -> absl::Status {
    if (!AreFinite(entry.tensor.dtype, data, bytes)) {
      return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_NAN_LOSS,
                        fmt::format("step {} is not saved: tensor {} holds a NaN or an infinity", step, entry.name));
    }
    checksum.Update(data, bytes);
    return writer.Write(data, bytes);
  }));
  return checksum.Value();
}

}  // namespace

absl::StatusOr<Manifest> WriteShardFile(const std::string& directory, const std::string& name, const CheckpointMeta& meta,
                                        std::vector<const CheckpointTensor*> tensors) {
  // Wide elements first, so that every tensor is aligned to its element size.
  std::stable_sort(tensors.begin(), tensors.end(), [](const CheckpointTensor* a, const CheckpointTensor* b) {
    return SizeOf(a->tensor.dtype) > SizeOf(b->tensor.dtype);
  });
  std::set<std::tuple<std::string, int64_t, int64_t>> parts;
  for (const CheckpointTensor* entry : tensors) {
    if (!parts.insert({entry->name, entry->shard_begin, entry->flat_begin}).second) {
      return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                        fmt::format("tensor {} is saved twice by one rank", entry->name));
    }
  }
  const std::string header = HeaderOf(meta, tensors);
  if (header.size() > SafetensorsWriter::kMaxHeaderBytes) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_CHECKPOINT_IO_ERROR,
                      fmt::format("the header of {} would have {} bytes, at most {} are readable", name, header.size(),
                                  SafetensorsWriter::kMaxHeaderBytes));
  }
  MB_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(directory + "/" + name));
  MB_RETURN_IF_ERROR(writer.Write(header));
  Manifest manifest;
  HostChunks chunks;
  for (const CheckpointTensor* entry : tensors) {
    MB_FAILPOINT("checkpoint.tensor");
    ManifestShard shard{name, PartOf(*entry), writer.bytes_written(), static_cast<int64_t>(entry->tensor.bytes()), 0};
    MB_ASSIGN_OR_RETURN(shard.hash, WriteHashed(writer, &chunks, meta.step, *entry));
    manifest.tensors.push_back({entry->name, entry->tensor.dtype, entry->global_shape, {std::move(shard)}});
  }
  manifest.files.push_back({name, writer.bytes_written(), static_cast<int64_t>(header.size()), HashOf(header)});
  MB_FAILPOINT("checkpoint.before_shard_sync");
  MB_RETURN_IF_ERROR(writer.SyncAndClose());
  return manifest;
}

}  // namespace mbridge
