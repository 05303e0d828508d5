// Our checkpoint to Hugging Face.
#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/element_type.h"
#include "engine/bridge/exported_tensors.h"
#include "engine/bridge/output_directory.h"
#include "engine/core/file.h"
#include "engine/core/safetensors_writer.h"

namespace mbridge {
namespace {

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
    MB_ASSIGN_OR_RETURN(const OutputDirectory output,
                        OutputDirectory::Open(options_.path, source_.Fingerprint(options_.shard_bytes)));
    for (const OutputFile& file : files_) {
      const auto tensors = static_cast<int64_t>(file.tensors.size());
      progress_.total_bytes += file.bytes;
      progress_.total_tensors += tensors;
      if (!output.Has(file.name)) continue;
      progress_.bytes += file.bytes;
      progress_.tensors += tensors;
    }
    MB_RETURN_IF_ERROR(output.CheckRoom(progress_.total_bytes - progress_.bytes));
    for (const OutputFile& file : files_) {
      if (!output.Has(file.name)) MB_RETURN_IF_ERROR(WriteFile(output, file));
    }
    MB_RETURN_IF_ERROR(WriteRest(output));
    MB_RETURN_IF_ERROR(output.Commit());
    return ExportedModel{options_.path, progress_.total_bytes, static_cast<int>(progress_.total_tensors),
                         static_cast<int>(files_.size())};
  }

 private:
  absl::Status WriteFile(const OutputDirectory& output, const OutputFile& file) {
    MB_ASSIGN_OR_RETURN(const std::string unfinished, output.Begin(file.name));
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
    return output.Finish(file.name);
  }

  absl::Status WriteRest(const OutputDirectory& output) {
    if (files_.size() > 1) {
      std::map<std::string, std::string> sorted;
      for (const OutputFile& file : files_) {
        for (const SafetensorsTensor& tensor : file.tensors) sorted[tensor.name] = file.name;
      }
      const nlohmann::json index = {{"metadata", {{"total_size", progress_.total_bytes}}}, {"weight_map", sorted}};
      MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(kIndexName), index.dump(2) + "\n"));
    }
    MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf("config.json"), source_.ConfigText()));
    for (const std::string& side_file : source_.side_files()) {
      constexpr int64_t kMaxSideFile = int64_t{1} << 30;
      MB_ASSIGN_OR_RETURN(const std::string content, ReadWholeFile(side_file, kMaxSideFile));
      MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(std::filesystem::path(side_file).filename().string()), content));
    }
    return absl::OkStatus();
  }

  const ExportOptions& options_;
  const ConversionObserver& observer_;
  ExportSource& source_;
  std::vector<OutputFile> files_;
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
