#include "engine/checkpoint/manifest.h"

#include <array>
#include <map>

#include <fmt/format.h>
#include <xxhash.h>
#include <nlohmann/json.hpp>

#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

using nlohmann::json;

namespace {

constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
constexpr const char* kFormatName = "mbridge-checkpoint";

json ShapeToJson(const Shape& shape) {
  json dims = json::array();
  for (int axis = 0; axis < shape.rank(); ++axis) dims.push_back(shape[axis]);
  return dims;
}

Shape ShapeFromJson(const json& dims) {
  Shape shape;
  for (const json& dim : dims) shape.Append(dim.get<int64_t>());
  return shape;
}

DType DTypeFromName(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32, DType::kI64, DType::kU8}) {
    if (NameOf(dtype) == name) return dtype;
  }
  ThrowEngineError("unknown element type \"{}\"", name);
}

uint64_t HashFromText(const std::string& text) {
  size_t used = 0;
  const uint64_t hash = std::stoull(text, &used, 16);
  if (used != 16 || text.size() != 16) ThrowEngineError("\"{}\" is no checksum", text);
  return hash;
}

json ShardToJson(const ManifestShard& shard) {
  return {{"file", shard.file},
          {"shape", ShapeToJson(shard.part.shard_shape)},
          {"axis", shard.part.shard_axis},
          {"begin", shard.part.shard_begin},
          {"flat_begin", shard.part.flat_begin},
          {"elements", shard.part.count},
          {"offset", shard.offset},
          {"bytes", shard.bytes},
          {"xxh3", HashText(shard.hash)}};
}

ManifestShard ShardFromJson(const json& entry, const ManifestTensor& tensor) {
  ManifestShard shard;
  shard.file = entry.at("file").get<std::string>();
  shard.part = {tensor.shape,
                ShapeFromJson(entry.at("shape")),
                entry.at("axis").get<int>(),
                entry.at("begin").get<int64_t>(),
                entry.at("flat_begin").get<int64_t>(),
                entry.at("elements").get<int64_t>()};
  shard.offset = entry.at("offset").get<int64_t>();
  shard.bytes = entry.at("bytes").get<int64_t>();
  shard.hash = HashFromText(entry.at("xxh3").get<std::string>());
  return shard;
}

void CheckShard(const ManifestTensor& tensor, const ManifestShard& shard, const std::map<std::string, ManifestFile>& files) {
  if (const std::string problem = CheckPart(shard.part); !problem.empty())
    ThrowEngineError("tensor {}: {}", tensor.name, problem);
  const auto file = files.find(shard.file);
  if (file == files.end()) ThrowEngineError("tensor {}: file {} is not listed", tensor.name, shard.file);
  if (shard.bytes != shard.part.count * static_cast<int64_t>(SizeOf(tensor.dtype)) || shard.offset < file->second.header_bytes ||
      shard.offset > file->second.bytes - shard.bytes) {
    ThrowEngineError("tensor {}: {} bytes at {} do not fit file {} of {} bytes", tensor.name, shard.bytes, shard.offset,
                     shard.file, file->second.bytes);
  }
}

Manifest ManifestFromJson(const json& root) {
  Manifest manifest;
  CheckpointMeta& meta = manifest.meta;
  meta.step = root.at("step").get<int64_t>();
  meta.consumed_samples = root.at("consumed_samples").get<int64_t>();
  meta.run_name = root.at("run_name").get<std::string>();
  meta.job_id = root.at("job_id").get<std::string>();
  meta.build_id = root.at("build_id").get<std::string>();
  meta.attempt = root.at("attempt").get<int>();
  meta.config_text = root.at("config").get<std::string>();
  meta.has_optimizer_state = root.at("has_optimizer_state").get<bool>();
  meta.state_json = root.at("state").dump();
  manifest.world_size = root.at("world_size").get<int>();
  std::map<std::string, ManifestFile> files;
  for (const json& entry : root.at("files")) {
    ManifestFile file{entry.at("name").get<std::string>(), entry.at("bytes").get<int64_t>(),
                      entry.at("header_bytes").get<int64_t>(), HashFromText(entry.at("header_xxh3").get<std::string>())};
    if (file.name.empty() || file.name[0] == '.' || file.name.find('/') != std::string::npos || file.header_bytes < 8 ||
        file.header_bytes > file.bytes) {
      ThrowEngineError("file entry \"{}\" is not valid", file.name);
    }
    files[file.name] = file;
    manifest.files.push_back(std::move(file));
  }
  for (const json& entry : root.at("tensors")) {
    ManifestTensor tensor{entry.at("name").get<std::string>(),
                          DTypeFromName(entry.at("dtype").get<std::string>()),
                          ShapeFromJson(entry.at("shape")),
                          {}};
    for (const json& shard : entry.at("shards")) {
      tensor.shards.push_back(ShardFromJson(shard, tensor));
      CheckShard(tensor, tensor.shards.back(), files);
    }
    manifest.tensors.push_back(std::move(tensor));
  }
  return manifest;
}

}  // namespace

std::string ToJson(const Manifest& manifest) {
  const CheckpointMeta& meta = manifest.meta;
  json files = json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"header_bytes", file.header_bytes},
                     {"header_xxh3", HashText(file.header_hash)}});
  }
  json tensors = json::array();
  for (const ManifestTensor& tensor : manifest.tensors) {
    json shards = json::array();
    for (const ManifestShard& shard : tensor.shards) shards.push_back(ShardToJson(shard));
    tensors.push_back({{"name", tensor.name},
                       {"dtype", std::string(NameOf(tensor.dtype))},
                       {"shape", ShapeToJson(tensor.shape)},
                       {"shards", shards}});
  }
  const json root = {{"format", kFormatName},
                     {"format_version", kFormatVersion},
                     {"step", meta.step},
                     {"consumed_samples", meta.consumed_samples},
                     {"run_name", meta.run_name},
                     {"job_id", meta.job_id},
                     {"attempt", meta.attempt},
                     {"build_id", meta.build_id},
                     {"config", meta.config_text},
                     {"has_optimizer_state", meta.has_optimizer_state},
                     {"state", json::parse(meta.state_json)},
                     {"world_size", manifest.world_size},
                     {"files", files},
                     {"tensors", tensors}};
  return root.dump(1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path) {
  const json root = json::parse(text, nullptr, false);
  if (root.is_discarded() || !root.is_object() || root.value("format", json()) != kFormatName) {
    return CorruptCheckpoint(fmt::format("{} is not the manifest of a checkpoint", path));
  }
  try {
    if (const int version = root.at("format_version").get<int>(); version > kFormatVersion) {
      return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_CHECKPOINT_IO_ERROR,
                        fmt::format("{} has format version {}, this program reads up to {}; use a newer version", path, version,
                                    kFormatVersion));
    }
    return ManifestFromJson(root);
  } catch (const std::exception& error) {
    return CorruptCheckpoint(fmt::format("{} is damaged: {}", path, error.what()));
  }
}

absl::StatusOr<ManifestWithHash> ReadManifest(const std::string& checkpoint, const std::string& expected_hash) {
  const std::string path = fmt::format("{}/{}", checkpoint, kManifestName);
  absl::StatusOr<std::string> text = ReadWholeFile(path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) {
    return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND,
                      fmt::format("no checkpoint at {}: manifest.json is missing", checkpoint));
  }
  if (!text.ok()) return AsCheckpointStatus(text.status(), true);
  ManifestWithHash result;
  result.hash = HashText(HashOf(*text));
  result.bytes = static_cast<int64_t>(text->size());
  if (!expected_hash.empty() && result.hash != expected_hash) {
    return CorruptCheckpoint(fmt::format("{} has checksum {}, recorded was {}", path, result.hash, expected_hash));
  }
  MB_ASSIGN_OR_RETURN(result.manifest, ParseManifest(*text, path));
  return result;
}

Part PartOf(const CheckpointTensor& tensor) {
  return {tensor.global_shape, tensor.shard_shape, tensor.shard_axis,
          tensor.shard_begin,  tensor.flat_begin,  tensor.tensor.size()};
}

std::string HashText(uint64_t hash) { return fmt::format("{:016x}", hash); }

uint64_t HashOf(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

absl::Status CorruptCheckpoint(std::string_view message) {
  return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT, message);
}

absl::Status AsCheckpointStatus(const absl::Status& status, bool reading) {
  if (status.ok() || ReasonOf(status) != v1::REASON_UNSPECIFIED) return status;
  const std::string message(status.message());
  if (reading && (absl::IsDataLoss(status) || absl::IsNotFound(status))) return CorruptCheckpoint(message);
  return MakeStatus(status.code(), v1::REASON_CHECKPOINT_IO_ERROR, message);
}

}  // namespace mbridge
