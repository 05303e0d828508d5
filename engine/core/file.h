// Durable file primitives. A status names the path; a full disk is RESOURCE_EXHAUSTED with reason DISK_FULL, a missing file
// NOT_FOUND, a file that ends early DATA_LOSS, other faults UNAVAILABLE. Objects belong to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

// The status of a failed call on `path` with this errno: "cannot write /x/y: No space left on device".
absl::Status FileError(int error_number, std::string_view verb, const std::string& path);

// A new file, written front to back. The destructor closes without syncing.
class FileWriter {
 public:
  // Fails when the file exists.
  static absl::StatusOr<FileWriter> Create(const std::string& path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();

  absl::Status Write(const void* data, size_t bytes);
  absl::Status Write(std::string_view text) { return Write(text.data(), text.size()); }
  // Data and metadata on the disk, then closed. Nothing may be written after.
  absl::Status SyncAndClose();
  int64_t bytes_written() const { return bytes_written_; }

 private:
  FileWriter(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
  int64_t bytes_written_ = 0;
};

class FileReader {
 public:
  static absl::StatusOr<FileReader> Open(const std::string& path);
  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&&) = delete;
  ~FileReader();

  // Exactly `bytes` from `offset`; DATA_LOSS when the file ends before.
  absl::Status ReadAt(int64_t offset, void* data, size_t bytes) const;
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  FileReader(int fd, std::string path, int64_t size) : fd_(fd), path_(std::move(path)), size_(size) {}
  int fd_;
  std::string path_;
  int64_t size_;
};

// Whole content; RESOURCE_EXHAUSTED (without a reason) above `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t max_bytes);
// Readers see the old or the whole new content, also after a power cut: temporary sibling, fsync, rename, fsync of the folder.
absl::Status WriteFileDurably(const std::string& path, std::string_view content);
// Renames and syncs the parent folder of `to`. Fails when `to` exists; after an error `from` is where it was.
absl::Status RenameDurably(const std::string& from, const std::string& to);
absl::Status SyncDirectory(const std::string& path);
// mkdir -p; every new folder is synced into its parent.
absl::Status MakeDirectories(const std::string& path);
// Removes a file or a whole folder; fine when there is none.
absl::Status RemoveAll(const std::string& path);
// Bytes that an unprivileged process can still write under `path`.
absl::StatusOr<int64_t> FreeDiskBytes(const std::string& path);
std::string ParentDirectory(const std::string& path);

}  // namespace mbridge
