// Reader of the safetensors format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/core/file.h"

namespace mbridge {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // The format's word: "F32", "BF16", "F8_E4M3", …
  std::vector<int64_t> shape;
  int64_t offset = 0;  // Of its first byte in the file.
  int64_t bytes = 0;

  int64_t NumElements() const;
};

// Bytes of an element of the format's dtype, 0 for an unknown word.
int64_t SafetensorsElementBytes(std::string_view dtype);

// An open file with a checked header. Reading is thread-safe.
class SafetensorsFile {
 public:
  static constexpr int64_t kMaxHeaderBytes = 100'000'000;  // The format's limit.

  // DATA_LOSS for a file that breaks the format, saying how: header longer than the limit or the file, not one JSON object, a key
  // twice, an unknown dtype, a size that is not shape times dtype, tensors that overlap or leave bytes of the file out. Faults of
  // the file system as in engine/core/file.h.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  // In the order of their bytes.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // Null when there is none of that name.
  const SafetensorsEntry* Find(std::string_view name) const;
  // The header's __metadata__.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return file_.path(); }

  // The little-endian bytes of an entry of this file, entry.bytes of them.
  absl::Status Read(const SafetensorsEntry& entry, void* data) const;

 private:
  explicit SafetensorsFile(FileReader file) : file_(std::move(file)) {}
  absl::Status ParseHeader(const std::string& text, int64_t data_begin);

  FileReader file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace mbridge
