#include "engine/bridge/output_directory.h"

#include <filesystem>

#include <fmt/format.h>

#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr const char* kFingerprintName = "fingerprint";

}  // namespace

absl::StatusOr<OutputDirectory> OutputDirectory::Open(const std::string& path, const std::string& fingerprint) {
  const std::string parent = ParentDirectory(path);
  OutputDirectory output(path, fmt::format("{}/.tmp-{}", parent, std::filesystem::path(path).filename().string()));
  if (std::error_code error; std::filesystem::exists(path, error) || error) {
    return MakeStatus(absl::StatusCode::kAlreadyExists, v1::REASON_INVALID_REQUEST, fmt::format("{} exists already", path));
  }
  MB_RETURN_IF_ERROR(MakeDirectories(parent));
  const std::string mark = output.PathOf(kFingerprintName);
  const absl::StatusOr<std::string> known = ReadWholeFile(mark, 4096);
  if (known.ok() && *known == fingerprint) return output;
  MB_RETURN_IF_ERROR(RemoveAll(output.temporary_));
  MB_RETURN_IF_ERROR(MakeDirectories(output.temporary_));
  MB_RETURN_IF_ERROR(WriteFileDurably(mark, fingerprint));
  return output;
}

bool OutputDirectory::Has(const std::string& name) const {
  std::error_code error;
  return std::filesystem::exists(PathOf(name), error);
}

absl::StatusOr<std::string> OutputDirectory::Begin(const std::string& name) const {
  const std::string unfinished = PathOf(name) + ".part";
  MB_RETURN_IF_ERROR(MakeDirectories(ParentDirectory(unfinished)));
  MB_RETURN_IF_ERROR(RemoveAll(unfinished));
  return unfinished;
}

absl::Status OutputDirectory::Finish(const std::string& name) const {
  return RenameDurably(PathOf(name) + ".part", PathOf(name));
}

absl::Status OutputDirectory::CheckRoom(int64_t bytes) const {
  constexpr int64_t kSlackBytes = int64_t{16} << 20;
  MB_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeDiskBytes(temporary_));
  if (free_bytes >= bytes + kSlackBytes) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_DISK_FULL,
                    fmt::format("the model needs {} bytes more, {} has {} free", bytes, ParentDirectory(path_), free_bytes));
}

absl::Status OutputDirectory::Commit() const {
  MB_RETURN_IF_ERROR(RemoveAll(PathOf(kFingerprintName)));
  MB_RETURN_IF_ERROR(SyncDirectory(temporary_));
  return RenameDurably(temporary_, path_);
}

}  // namespace mbridge
