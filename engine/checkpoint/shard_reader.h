// Reads the files of a checkpoint and checks what is read. Host memory only; one thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/core/file.h"

namespace mbridge {

// Opens each file once.
class ShardReader {
 public:
  ShardReader(const std::string& checkpoint, const Manifest& manifest);

  // The shard's bytes, whole; DATA_LOSS names file and tensor.
  absl::Status Read(const ManifestTensor& tensor, const ManifestShard& shard, void* into);
  // As Read, without keeping the bytes.
  absl::Status Check(const ManifestTensor& tensor, const ManifestShard& shard);
  absl::Status CheckHeader(const ManifestFile& file);

 private:
  absl::StatusOr<const FileReader*> Open(const std::string& name);
  absl::StatusOr<uint64_t> HashRange(const FileReader& reader, int64_t offset, int64_t bytes);

  std::string checkpoint_;
  std::map<std::string, int64_t> sizes_;
  std::map<std::string, std::unique_ptr<FileReader>> readers_;
  std::vector<char> buffer_;
};

// The part `want` of a saved tensor as `type`, from whichever shards hold it. Floating-point values are converted; F64 is only
// read. DATA_LOSS when the shards do not hold all of it.
absl::Status ReadPart(ShardReader& reader, const ManifestTensor& saved, const Part& want, DType type, void* into);

// What ReadPart converts between: F32, BF16, F16, and F64 as a source.
bool CanConvert(DType from, DType to);

}  // namespace mbridge
