// The content of manifest.json, and the file names of a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/layout.h"

namespace mbridge {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kTemporaryPrefix = ".tmp-";
inline constexpr int kFormatVersion = 1;

struct ManifestShard {
  std::string file;
  Part part;
  int64_t offset = 0;  // Of the first byte in the file.
  int64_t bytes = 0;
  uint64_t hash = 0;  // XXH3-64 of these bytes.
};

struct ManifestTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<ManifestShard> shards;
};

struct ManifestFile {
  std::string name;
  int64_t bytes = 0;
  int64_t header_bytes = 0;  // Length prefix and JSON header of safetensors.
  uint64_t header_hash = 0;
};

struct Manifest {
  CheckpointMeta meta;
  int world_size = 1;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
};

std::string ToJson(const Manifest& manifest);
// Checks everything that later reading relies on: names without '/', parts inside their tensors, bytes inside their files.
// DATA_LOSS (CHECKPOINT_CORRUPT) naming `path`; a newer format version is FAILED_PRECONDITION.
absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path);

// The manifest of a checkpoint folder, with its hash. NOT_FOUND (CHECKPOINT_NOT_FOUND), DATA_LOSS.
struct ManifestWithHash {
  Manifest manifest;
  std::string hash;
  int64_t bytes = 0;
};
absl::StatusOr<ManifestWithHash> ReadManifest(const std::string& checkpoint, const std::string& expected_hash);

Part PartOf(const CheckpointTensor& tensor);
std::string HashText(uint64_t hash);  // 16 hexadecimal digits.
uint64_t HashOf(std::string_view bytes);
absl::Status CorruptCheckpoint(std::string_view message);
// A file status as one about checkpoints: reason CHECKPOINT_IO_ERROR unless it has one; early ends and missing files are
// CHECKPOINT_CORRUPT when `reading`.
absl::Status AsCheckpointStatus(const absl::Status& status, bool reading);

}  // namespace mbridge
