// Hugging Face to our checkpoint.
#include <algorithm>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/source_record.h"

namespace mbridge {
namespace {

struct PreparedImport {
  ModelDirectory directory;
  ImportedModel model;
  std::vector<StreamedCheckpoint::Entry> entries;  // By mapping.
  std::vector<SourceRecord::Entry> record;
  ConversionPlan plan;
};

absl::StatusOr<PreparedImport> Prepare(const ImportOptions& options) {
  if (options.vocab_multiple < 1) {
    return InvalidFields(v1::REASON_INVALID_REQUEST,
                         {{"vocab_multiple", fmt::format("is {}: at least 1", options.vocab_multiple)}});
  }
  MB_ASSIGN_OR_RETURN(const std::string path, FindModelDirectory(options.source));
  MB_ASSIGN_OR_RETURN(ModelDirectory directory, ModelDirectory::Open(path, options.roots));
  MB_ASSIGN_OR_RETURN(ImportedModel model, OpenModel(directory, options.vocab_multiple));
  PreparedImport prepared{std::move(directory), std::move(model), {}, {}, {}};
  ConversionPlan& plan = prepared.plan;
  plan.model_type = prepared.model.architecture->model_type;
  plan.model = prepared.model.config;
  plan.vocab_size = prepared.model.vocab_size;
  plan.notes = prepared.directory.notes();
  plan.skipped = prepared.model.skipped;
  std::map<std::string, std::string> used_by;
  for (const TensorMapping& mapping : prepared.model.mappings) {
    MB_ASSIGN_OR_RETURN(const DType dtype, TypeOf(prepared.directory, mapping, options.dtype));
    prepared.entries.push_back({mapping.ours, dtype, mapping.shape});
    plan.parameters += mapping.shape.NumElements();
    std::vector<std::string> from;
    for (const TheirTensor& tensor : mapping.theirs) {
      from.push_back(tensor.name);
      std::string& users = used_by[tensor.name];
      users += (users.empty() ? "" : ", ") + mapping.ours;
    }
    std::vector<int64_t> shape(static_cast<size_t>(mapping.shape.rank()));
    for (int axis = 0; axis < mapping.shape.rank(); ++axis) shape[static_cast<size_t>(axis)] = mapping.shape[axis];
    plan.result.push_back(
        {mapping.ours, std::string(NameOf(dtype)), shape, prepared.entries.back().bytes(), absl::StrJoin(from, ", ")});
    plan.result_bytes += prepared.entries.back().bytes();
  }
  std::set<std::string> recorded;
  for (const SafetensorsFile& file : prepared.directory.files()) {
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto alias = prepared.model.aliases.find(entry.name);
      const bool repeats = alias != prepared.model.aliases.end();
      const std::string owner = QuantisedOwner(entry.name);
      // The tensor that a reader sees: of a quantised one what it stands for.
      const std::string seen = !used_by.contains(entry.name) && used_by.contains(owner) ? owner : entry.name;
      const std::string users = repeats ? "the same as " + alias->second : (used_by.contains(seen) ? used_by.at(seen) : "");
      plan.source.push_back({entry.name, entry.dtype, entry.shape, entry.bytes, users});
      plan.source_bytes += entry.bytes;
      if (users.empty() || !recorded.insert(seen).second) continue;
      if (repeats) {
        prepared.record.push_back({entry.name, entry.dtype, alias->second});
        continue;
      }
      MB_ASSIGN_OR_RETURN(const auto source, SourceTensor::Open(prepared.directory, seen));
      prepared.record.push_back({seen, source->quantised() ? std::string(NameOf(source->type())) : source->stored_dtype()});
    }
  }
  return prepared;
}

}  // namespace

absl::StatusOr<GptConfig> ReadModelOf(const std::string& directory_or_name, const AllowedRoots& roots) {
  MB_ASSIGN_OR_RETURN(const std::string path, FindModelDirectory(directory_or_name));
  MB_ASSIGN_OR_RETURN(const Json config, ModelDirectory::ReadConfigOf(path, roots));
  MB_ASSIGN_OR_RETURN(const Architecture* architecture, ArchitectureOf(config));
  return ReadModelConfig(*architecture, config);
}

absl::StatusOr<ConversionPlan> PlanImport(const ImportOptions& options) {
  MB_ASSIGN_OR_RETURN(PreparedImport prepared, Prepare(options));
  return std::move(prepared.plan);
}

absl::StatusOr<SavedCheckpoint> RunImport(const ImportOptions& options, const ConversionObserver& observer) {
  MB_ASSIGN_OR_RETURN(const PreparedImport prepared, Prepare(options));
  ImportTarget target{
      .path = options.path,
      .fingerprint = fmt::format("{} {} {}", prepared.directory.Fingerprint(), options.dtype ? NameOf(*options.dtype) : "source",
                                 options.vocab_multiple),
      .meta = options.meta,
      .entries = prepared.entries,
      .read =
          [&](int index, void* into) {
            return ReadMapped(prepared.directory, prepared.model.mappings[index], prepared.entries[index].dtype, into);
          },
      .add_files =
          [&](const std::string& directory) { return WriteSourceRecord(directory, prepared.directory, prepared.record); }};
  if (options.config_text != nullptr) target.meta.config_text = options.config_text(prepared.model.config);
  return WriteImport(target, observer);
}

}  // namespace mbridge
