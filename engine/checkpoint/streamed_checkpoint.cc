#include "engine/checkpoint/streamed_checkpoint.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "engine/core/failpoint.h"
#include "engine/core/file.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr const char* kFingerprintName = "fingerprint";
constexpr int64_t kMaxSmallFile = int64_t{256} << 20;
constexpr int64_t kSlackBytes = int64_t{8} << 20;  // Headers and manifest.

std::string PartName(const std::string& file) { return file + ".part.json"; }

}  // namespace

absl::StatusOr<StreamedCheckpoint> StreamedCheckpoint::Open(const Options& options, const CheckpointMeta& meta,
                                                            std::vector<Entry> entries) {
  StreamedCheckpoint checkpoint;
  checkpoint.options_ = options;
  checkpoint.meta_ = meta;
  checkpoint.entries_ = std::move(entries);
  const std::string parent = ParentDirectory(options.path);
  checkpoint.directory_ =
      fmt::format("{}/{}{}", parent, kTemporaryPrefix, std::filesystem::path(options.path).filename().string());
  if (std::error_code error; std::filesystem::exists(options.path, error) || error) {
    return MakeStatus(absl::StatusCode::kAlreadyExists, v1::REASON_CHECKPOINT_IO_ERROR,
                      fmt::format("{} exists already", options.path));
  }
  checkpoint.PlanFiles(options.file_bytes);
  checkpoint.parts_.resize(checkpoint.files_.size());
  MB_RETURN_IF_ERROR(AsCheckpointStatus(checkpoint.TakeOver(), false));
  int64_t missing = kSlackBytes - checkpoint.bytes_taken_over_;
  for (const Entry& entry : checkpoint.entries_) missing += entry.bytes();
  MB_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeDiskBytes(checkpoint.directory_));
  if (free_bytes < missing) {
    return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_DISK_FULL,
                      fmt::format("the checkpoint needs {} bytes more, {} has {} free", missing, parent, free_bytes));
  }
  return checkpoint;
}

void StreamedCheckpoint::PlanFiles(int64_t file_bytes) {
  int64_t filled = file_bytes;
  for (int i = 0; i < static_cast<int>(entries_.size()); ++i) {
    if (filled >= file_bytes) {
      files_.push_back({fmt::format("rank_00000_{:05}.safetensors", files_.size()), {}, false});
      filled = 0;
    }
    files_.back().entries.push_back(i);
    filled += entries_[i].bytes();
  }
  // Wide elements first, so that every tensor is aligned to its element size.
  for (DataFile& file : files_) {
    std::stable_sort(file.entries.begin(), file.entries.end(),
                     [&](int a, int b) { return SizeOf(entries_[a].dtype) > SizeOf(entries_[b].dtype); });
  }
}

absl::Status StreamedCheckpoint::TakeOver() {
  const std::string mark = directory_ + "/" + kFingerprintName;
  const absl::StatusOr<std::string> known = ReadWholeFile(mark, kMaxSmallFile);
  if (!known.ok() || *known != options_.fingerprint) {
    MB_RETURN_IF_ERROR(RemoveAll(directory_));
    MB_RETURN_IF_ERROR(MakeDirectories(directory_));
    return WriteFileDurably(mark, options_.fingerprint);
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    const std::string path = directory_ + "/" + files_[i].name;
    const absl::StatusOr<std::string> text = ReadWholeFile(directory_ + "/" + PartName(files_[i].name), kMaxSmallFile);
    const absl::StatusOr<Manifest> part =
        text.ok() ? ParseManifest(*text, PartName(files_[i].name)) : absl::StatusOr<Manifest>(text.status());
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (!part.ok() || error || part->files.size() != 1 || static_cast<int64_t>(size) != part->files[0].bytes ||
        part->tensors.size() != files_[i].entries.size()) {
      MB_RETURN_IF_ERROR(RemoveAll(path));
      continue;
    }
    parts_[i] = *part;
    files_[i].done = true;
    for (const int entry : files_[i].entries) bytes_taken_over_ += entries_[entry].bytes();
    tensors_taken_over_ += static_cast<int>(files_[i].entries.size());
  }
  while (file_ < files_.size() && files_[file_].done) ++file_;
  return absl::OkStatus();
}

int StreamedCheckpoint::next() const { return file_ < files_.size() ? files_[file_].entries[place_] : -1; }

absl::Status StreamedCheckpoint::BeginFile() {
  std::vector<SafetensorsTensor> tensors;
  for (const int index : files_[file_].entries) {
    const Entry& entry = entries_[index];
    SafetensorsTensor tensor{entry.name, std::string(NameOf(entry.dtype)), {}, entry.bytes()};
    for (int axis = 0; axis < entry.shape.rank(); ++axis) tensor.shape.push_back(entry.shape[axis]);
    tensors.push_back(std::move(tensor));
  }
  auto writer = SafetensorsWriter::Create(directory_ + "/" + files_[file_].name, std::move(tensors),
                                          {{"format", "mbridge-checkpoint"}, {"step", std::to_string(meta_.step)}});
  MB_RETURN_IF_ERROR(writer.status());
  writer_.emplace(*std::move(writer));
  return absl::OkStatus();
}

absl::Status StreamedCheckpoint::Write(const void* data) {
  if (!writer_.has_value()) MB_RETURN_IF_ERROR(AsCheckpointStatus(BeginFile(), false));
  MB_FAILPOINT("checkpoint.tensor");
  const Entry& entry = entries_[next()];
  const auto bytes = static_cast<size_t>(entry.bytes());
  MB_RETURN_IF_ERROR(AsCheckpointStatus(writer_->Write(place_, 0, data, bytes), false));
  const Part whole{entry.shape, entry.shape, -1, 0, 0, entry.shape.NumElements()};
  parts_[file_].tensors.push_back(
      {entry.name,
       entry.dtype,
       entry.shape,
       {{files_[file_].name, whole, writer_->OffsetOf(place_), entry.bytes(), HashOf({static_cast<const char*>(data), bytes})}}});
  if (++place_ < files_[file_].entries.size()) return absl::OkStatus();
  return AsCheckpointStatus(FinishFile(), false);
}

absl::Status StreamedCheckpoint::FinishFile() {
  MB_RETURN_IF_ERROR(writer_->Finish());
  Manifest& part = parts_[file_];
  part.meta = meta_;
  part.files = {
      {files_[file_].name, writer_->file_bytes(), static_cast<int64_t>(writer_->header().size()), HashOf(writer_->header())}};
  writer_.reset();
  MB_RETURN_IF_ERROR(WriteFileDurably(directory_ + "/" + PartName(files_[file_].name), ToJson(part)));
  files_[file_].done = true;
  place_ = 0;
  while (file_ < files_.size() && files_[file_].done) ++file_;
  return absl::OkStatus();
}

absl::StatusOr<SavedCheckpoint> StreamedCheckpoint::Commit() {
  if (next() >= 0) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                      fmt::format("tensor {} was not written", entries_[next()].name));
  }
  Manifest manifest;
  manifest.meta = meta_;
  for (Manifest& part : parts_) {
    std::move(part.files.begin(), part.files.end(), std::back_inserter(manifest.files));
    std::move(part.tensors.begin(), part.tensors.end(), std::back_inserter(manifest.tensors));
  }
  const std::string text = ToJson(manifest);
  const absl::Status written = [&]() -> absl::Status {
    MB_RETURN_IF_ERROR(WriteFileDurably(fmt::format("{}/{}", directory_, kManifestName), text));
    for (const DataFile& file : files_) MB_RETURN_IF_ERROR(RemoveAll(directory_ + "/" + PartName(file.name)));
    MB_RETURN_IF_ERROR(RemoveAll(directory_ + "/" + kFingerprintName));
    MB_RETURN_IF_ERROR(SyncDirectory(directory_));
    if (const int injected = MB_FAILPOINT("checkpoint.before_rename"); injected != 0)
      return FileError(injected, "rename to", options_.path);
    return RenameDurably(directory_, options_.path);
  }();
  MB_RETURN_IF_ERROR(AsCheckpointStatus(written, false));
  SavedCheckpoint saved{options_.path, static_cast<int64_t>(text.size()), static_cast<int>(manifest.tensors.size()),
                        HashText(HashOf(text))};
  for (const ManifestFile& file : manifest.files) saved.bytes += file.bytes;
  return saved;
}

absl::Status StreamedCheckpoint::Abandon() {
  writer_.reset();
  return AsCheckpointStatus(RemoveAll(directory_), false);
}

}  // namespace mbridge
