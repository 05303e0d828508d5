#include "engine/checkpoint/shard_reader.h"

#include <algorithm>

#include <fmt/format.h>

#include "engine/checkpoint/checksum.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr size_t kReadChunk = size_t{4} << 20;

template <class T> float AsFloat(T value) { return ToFloat(value); }
float AsFloat(double value) { return static_cast<float>(value); }

template <class From, class To> void ConvertLoop(const void* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<To*>(to)[i] = FromFloat<To>(AsFloat(static_cast<const From*>(from)[i]));
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
  else if (from_type == DType::kF16)
    ConvertFrom<Float16>(from, to_type, to, count);
  else
    ConvertFrom<double>(from, to_type, to, count);
}

absl::Status Compare(const ManifestTensor& tensor, const ManifestShard& shard, uint64_t hash, const std::string& path) {
  if (hash == shard.hash) return absl::OkStatus();
  return CorruptCheckpoint(
      fmt::format("{}: tensor {} has checksum {}, written was {}", path, tensor.name, HashText(hash), HashText(shard.hash)));
}

}  // namespace

ShardReader::ShardReader(const std::string& checkpoint, const Manifest& manifest) : checkpoint_(checkpoint) {
  for (const ManifestFile& file : manifest.files) sizes_[file.name] = file.bytes;
}

absl::StatusOr<const FileReader*> ShardReader::Open(const std::string& name) {
  auto& reader = readers_[name];
  if (reader == nullptr) {
    absl::StatusOr<FileReader> opened = FileReader::Open(checkpoint_ + "/" + name);
    if (!opened.ok()) return AsCheckpointStatus(opened.status(), true);
    if (opened->size() != sizes_.at(name)) {
      return CorruptCheckpoint(fmt::format("{} has {} bytes, {} were written", opened->path(), opened->size(), sizes_.at(name)));
    }
    reader = std::make_unique<FileReader>(*std::move(opened));
  }
  return reader.get();
}

absl::Status ShardReader::Read(const ManifestTensor& tensor, const ManifestShard& shard, void* into) {
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

absl::Status ShardReader::Check(const ManifestTensor& tensor, const ManifestShard& shard) {
  MB_ASSIGN_OR_RETURN(const FileReader* reader, Open(shard.file));
  absl::StatusOr<uint64_t> hash = HashRange(*reader, shard.offset, shard.bytes);
  if (!hash.ok()) return AsCheckpointStatus(hash.status(), true);
  return Compare(tensor, shard, *hash, reader->path());
}

absl::Status ShardReader::CheckHeader(const ManifestFile& file) {
  MB_ASSIGN_OR_RETURN(const FileReader* reader, Open(file.name));
  absl::StatusOr<uint64_t> hash = HashRange(*reader, 0, file.header_bytes);
  if (!hash.ok()) return AsCheckpointStatus(hash.status(), true);
  if (*hash != file.header_hash)
    return CorruptCheckpoint(fmt::format("{}: the header has checksum {}, written was {}", reader->path(), HashText(*hash),
                                         HashText(file.header_hash)));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ShardReader::HashRange(const FileReader& reader, int64_t offset, int64_t bytes) {
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

bool CanConvert(DType from, DType to) {
  const auto is_float = [](DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; };
  return (is_float(from) || from == DType::kF64) && is_float(to);
}

absl::Status ReadPart(ShardReader& reader, const ManifestTensor& saved, const Part& want, DType type, void* into) {
  std::vector<char> buffer, converted;
  int64_t filled = 0;
  for (const ManifestShard& shard : saved.shards) {
    if (shard.part == want && saved.dtype == type) {
      MB_RETURN_IF_ERROR(reader.Read(saved, shard, into));
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
    filled += CopyOverlap(shard.part, source, want, into, SizeOf(type));
  }
  if (filled == want.count) return absl::OkStatus();
  return CorruptCheckpoint(
      fmt::format("tensor {}: the checkpoint holds {} of the {} elements needed", saved.name, filled, want.count));
}

}  // namespace mbridge
