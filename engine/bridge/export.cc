// Our checkpoint to Hugging Face.
#include <algorithm>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/element_type.h"
#include "engine/bridge/exported_tensors.h"
#include "engine/core/file.h"
#include "engine/core/safetensors_writer.h"

namespace mbridge {
namespace {

constexpr const char* kFingerprintName = "fingerprint";

struct OutputFile {
  std::string name;
  std::vector<SafetensorsTensor> tensors;
  int64_t bytes = 0;
};

std::vector<OutputFile> PlanFiles(const std::vector<OutputTensor>& tensors, int64_t shard_bytes) {
  std::vector<OutputFile> files;
  for (const OutputTensor& tensor : tensors) {
    if (files.empty() || (files.back().bytes > 0 && files.back().bytes + tensor.bytes() > shard_bytes)) files.emplace_back();
    files.back().tensors.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes()});
    files.back().bytes += tensor.bytes();
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  }
  return files;
}

// What one conversion of a checkpoint writes.
class Exporter {
 public:
  Exporter(const ExportOptions& options, const ConversionObserver& observer, ExportSource* source)
      : options_(options), observer_(observer), source_(*source), files_(PlanFiles(source->tensors(), options.shard_bytes)) {}

  absl::StatusOr<ExportedModel> Run() {
    const std::string parent = ParentDirectory(options_.path);
    temporary_ = fmt::format("{}/.tmp-{}", parent, std::filesystem::path(options_.path).filename().string());
    if (std::error_code error; std::filesystem::exists(options_.path, error) || error) {
      return MakeStatus(absl::StatusCode::kAlreadyExists, v1::REASON_INVALID_REQUEST,
                        fmt::format("{} exists already", options_.path));
    }
    MB_RETURN_IF_ERROR(MakeDirectories(parent));
    MB_RETURN_IF_ERROR(TakeOver());
    for (const OutputFile& file : files_) {
      progress_.total_bytes += file.bytes;
      progress_.total_tensors += static_cast<int64_t>(file.tensors.size());
    }
    MB_RETURN_IF_ERROR(CheckRoom(parent));
    for (const OutputFile& file : files_) {
      if (done_.contains(file.name)) continue;
      MB_RETURN_IF_ERROR(WriteFile(file));
    }
    MB_RETURN_IF_ERROR(WriteRest());
    MB_RETURN_IF_ERROR(RemoveAll(temporary_ + "/" + kFingerprintName));
    MB_RETURN_IF_ERROR(SyncDirectory(temporary_));
    MB_RETURN_IF_ERROR(RenameDurably(temporary_, options_.path));
    return ExportedModel{options_.path, progress_.total_bytes, static_cast<int>(progress_.total_tensors),
                         static_cast<int>(files_.size())};
  }

 private:
  // Data files get their name when they are whole, so that those that are there need not be written again.
  absl::Status TakeOver() {
    const std::string fingerprint = source_.Fingerprint(options_.shard_bytes);
    const std::string mark = temporary_ + "/" + kFingerprintName;
    const absl::StatusOr<std::string> known = ReadWholeFile(mark, 4096);
    if (!known.ok() || *known != fingerprint) {
      MB_RETURN_IF_ERROR(RemoveAll(temporary_));
      MB_RETURN_IF_ERROR(MakeDirectories(temporary_));
      return WriteFileDurably(mark, fingerprint);
    }
    for (const OutputFile& file : files_) {
      std::error_code error;
      if (!std::filesystem::exists(temporary_ + "/" + file.name, error)) continue;
      done_.insert(file.name);
      progress_.bytes += file.bytes;
      progress_.tensors += static_cast<int64_t>(file.tensors.size());
    }
    return absl::OkStatus();
  }

  absl::Status CheckRoom(const std::string& parent) const {
    constexpr int64_t kSlackBytes = int64_t{16} << 20;
    MB_ASSIGN_OR_RETURN(const int64_t free_bytes, FreeDiskBytes(temporary_));
    const int64_t missing = progress_.total_bytes - progress_.bytes + kSlackBytes;
    if (free_bytes >= missing) return absl::OkStatus();
    return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_DISK_FULL,
                      fmt::format("the model needs {} bytes more, {} has {} free", missing, parent, free_bytes));
  }

  absl::Status WriteFile(const OutputFile& file) {
    const std::string path = temporary_ + "/" + file.name, unfinished = path + ".part";
    MB_RETURN_IF_ERROR(RemoveAll(unfinished));
    MB_ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(unfinished, file.tensors, {{"format", "pt"}}));
    std::map<std::string, size_t> places;
    for (size_t i = 0; i < file.tensors.size(); ++i) places[file.tensors[i].name] = i;
    for (const TensorMapping& mapping : source_.mappings()) {
      const bool wanted = std::any_of(mapping.theirs.begin(), mapping.theirs.end(),
                                      [&](const TheirTensor& tensor) { return places.contains(tensor.name); });
      if (!wanted) continue;
      MB_RETURN_IF_ERROR(CheckStop(observer_));
      MB_RETURN_IF_ERROR(source_.Load(mapping));
      for (int i = 0; i < static_cast<int>(mapping.theirs.size()); ++i) {
        const auto place = places.find(mapping.theirs[i].name);
        if (place == places.end()) continue;
        const SafetensorsTensor& tensor = file.tensors[place->second];
        MB_ASSIGN_OR_RETURN(const ExportedPiece piece, source_.Piece(mapping, i, tensor.dtype));
        MB_RETURN_IF_ERROR(writer.Write(place->second, piece.offset, piece.data, static_cast<size_t>(piece.bytes)));
        progress_.bytes += piece.bytes;
        progress_.tensors += piece.offset + piece.bytes == tensor.bytes;
      }
      if (observer_.progress != nullptr) observer_.progress(progress_);
    }
    MB_RETURN_IF_ERROR(writer.Finish());
    return RenameDurably(unfinished, path);
  }

  absl::Status WriteRest() {
    if (files_.size() > 1) {
      std::map<std::string, std::string> sorted;
      for (const OutputFile& file : files_) {
        for (const SafetensorsTensor& tensor : file.tensors) sorted[tensor.name] = file.name;
      }
      const nlohmann::json index = {{"metadata", {{"total_size", progress_.total_bytes}}}, {"weight_map", sorted}};
      MB_RETURN_IF_ERROR(WriteFileDurably(temporary_ + "/" + kIndexName, index.dump(2) + "\n"));
    }
    MB_RETURN_IF_ERROR(WriteFileDurably(temporary_ + "/config.json", source_.ConfigText()));
    for (const std::string& side_file : source_.side_files()) {
      constexpr int64_t kMaxSideFile = int64_t{1} << 30;
      MB_ASSIGN_OR_RETURN(const std::string content, ReadWholeFile(side_file, kMaxSideFile));
      MB_RETURN_IF_ERROR(WriteFileDurably(temporary_ + "/" + std::filesystem::path(side_file).filename().string(), content));
    }
    return absl::OkStatus();
  }

  const ExportOptions& options_;
  const ConversionObserver& observer_;
  ExportSource& source_;
  std::vector<OutputFile> files_;
  std::string temporary_;
  std::set<std::string> done_;
  ConversionProgress progress_;
};

}  // namespace

absl::StatusOr<ConversionPlan> PlanExport(const ExportOptions& options) {
  MB_ASSIGN_OR_RETURN(const auto source, ExportSource::Open(options));
  return source->Plan();
}

absl::StatusOr<ExportedModel> RunExport(const ExportOptions& options, const ConversionObserver& observer) {
  MB_ASSIGN_OR_RETURN(const auto source, ExportSource::Open(options));
  return Exporter(options, observer, source.get()).Run();
}

}  // namespace mbridge
