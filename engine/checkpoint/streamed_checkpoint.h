// A checkpoint of one process that is written tensor by tensor, for conversions: memory for one tensor, and a conversion that was
// stopped goes on where it was.
//
// It is built as the sibling `.tmp-<name>`, in data files of bounded size. Beside each finished data file lies its part of the
// manifest; a later writer with the same fingerprint takes finished files over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/manifest.h"
#include "engine/core/safetensors_writer.h"

namespace mbridge {

class StreamedCheckpoint {
 public:
  struct Entry {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
    int64_t bytes() const { return shape.NumElements() * static_cast<int64_t>(SizeOf(dtype)); }
  };
  struct Options {
    std::string path;         // Of the finished checkpoint; must not exist.
    std::string fingerprint;  // Of everything that the content depends on. Another one than that of a rest: the rest is removed.
    int64_t file_bytes = int64_t{2} << 30;  // A data file gets no further tensor once it is this large.
  };

  // Makes or takes over the temporary folder. Needs room on the disk for what is missing (DISK_FULL).
  static absl::StatusOr<StreamedCheckpoint> Open(const Options& options, const CheckpointMeta& meta, std::vector<Entry> entries);
  StreamedCheckpoint(StreamedCheckpoint&&) = default;

  // Index of the entry to write next, -1 when all are written. The order is not that of the entries.
  int next() const;
  // The bytes of entry next().
  absl::Status Write(const void* data);
  const Entry& entry(int index) const { return entries_[index]; }
  int64_t bytes_taken_over() const { return bytes_taken_over_; }
  int tensors_taken_over() const { return tensors_taken_over_; }
  // Of the temporary folder, for files that shall lie beside the data.
  const std::string& directory() const { return directory_; }

  // After the last Write: manifest, rename. The checkpoint is durable when it returns.
  absl::StatusOr<SavedCheckpoint> Commit();
  // Removes everything.
  absl::Status Abandon();

 private:
  struct DataFile {
    std::string name;
    std::vector<int> entries;
    bool done = false;
  };
  StreamedCheckpoint() = default;
  void PlanFiles(int64_t file_bytes);
  absl::Status TakeOver();
  absl::Status BeginFile();
  absl::Status FinishFile();

  Options options_;
  CheckpointMeta meta_;
  std::vector<Entry> entries_;
  std::string directory_;
  std::vector<DataFile> files_;
  std::vector<Manifest> parts_;  // By file.
  size_t file_ = 0;              // Being written.
  size_t place_ = 0;             // In its entries.
  std::optional<SafetensorsWriter> writer_;
  int64_t bytes_taken_over_ = 0;
  int tensors_taken_over_ = 0;
};

}  // namespace mbridge
