// Megatron-LM to our checkpoint, and the comparison of the two.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/logits_comparison.h"
#include "engine/bridge/source_record.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/megatron/conversion.h"
#include "engine/megatron/model_arguments.h"
#include "engine/megatron/stored_model.h"

namespace mbridge {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWordTable = "embedding.word_embeddings.weight";
constexpr const char* kHead = "output_layer.weight";

struct PreparedImport {
  StoredModel model;
  std::optional<ModelDirectory> like;
  std::vector<ParameterSource> sources;            // By parameter.
  std::vector<StreamedCheckpoint::Entry> entries;  // By parameter.
  ConversionPlan plan;
};

// Reads what says the model: config.json of `like` or the run's arguments.
absl::Status ReadModel(const MegatronImportOptions& options, PreparedImport* prepared) {
  const StoredModel& stored = prepared->model;
  ConversionPlan& plan = prepared->plan;
  plan.model_type = fmt::format("gpt (Megatron-LM, {})", stored.format);
  const auto table = stored.tensors.find(kWordTable);
  if (table == stored.tensors.end() || table->second.shape.empty()) {
    return UnsupportedCheckpoint(stored.path, fmt::format("there is no tensor {}: it holds no GPT model", kWordTable));
  }
  const int64_t rows = table->second.shape[0] * (table->second.split ? static_cast<int64_t>(table->second.pieces.size()) : 1);
  if (!options.like.empty()) {
    MB_ASSIGN_OR_RETURN(const std::string path, FindModelDirectory(options.like));
    MB_ASSIGN_OR_RETURN(prepared->like, ModelDirectory::Open(path, options.roots));
    MB_ASSIGN_OR_RETURN(const Architecture* architecture, ArchitectureOf(prepared->like->config()));
    MB_ASSIGN_OR_RETURN(plan.model, ReadModelConfig(*architecture, prepared->like->config()));
    plan.vocab_size = plan.model.padded_vocab_size;
    plan.notes.push_back(fmt::format("the model is that of {}/config.json", path));
  } else if (stored.arguments == nullptr) {
    return UnsupportedCheckpoint(
        stored.path,
        "the run's arguments are not in it, so what the model is must come from elsewhere: give a Hugging "
        "Face directory with its config.json (--like DIR)");
  } else {
    MB_ASSIGN_OR_RETURN(plan.model, ModelOfArguments(*stored.arguments));
    plan.vocab_size = IntArgument(*stored.arguments, "vocab_size", rows);
  }
  plan.model.padded_vocab_size = rows;
  if (plan.vocab_size < 1 || plan.vocab_size > rows) plan.vocab_size = rows;
  return absl::OkStatus();
}

std::string FirstOf(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(names.size(), kShown);
  return absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", ") +
         (names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "");
}

// Where each parameter is; the tensors of theirs that are used, with what they become.
absl::Status FindParameters(const MegatronImportOptions& options, PreparedImport* prepared,
                            std::map<std::string, std::string>* used_by) {
  ConversionPlan& plan = prepared->plan;
  MB_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> parameters, ModelParameters(plan.model));
  std::vector<std::string> missing;
  for (const ParameterSpec& parameter : parameters) {
    absl::StatusOr<ParameterSource> source = prepared->model.Find(parameter.name, parameter.global_shape, plan.model);
    if (absl::IsNotFound(source.status())) {
      missing.push_back(parameter.name);
      continue;
    }
    MB_RETURN_IF_ERROR(source.status());
    const bool is_float = source->dtype != DType::kI32 && source->dtype != DType::kI64 && source->dtype != DType::kU8;
    const DType dtype = options.dtype && is_float ? *options.dtype : source->dtype;
    for (const std::string& key : source->keys) {
      std::string& users = (*used_by)[key];
      if (users.empty()) {
        users = parameter.name;
      } else if (!users.ends_with(" ...")) {
        users += " ...";
      }
    }
    const StreamedCheckpoint::Entry entry{parameter.name, dtype, parameter.global_shape};
    std::vector<int64_t> shape;
    for (int axis = 0; axis < parameter.global_shape.rank(); ++axis) shape.push_back(parameter.global_shape[axis]);
    plan.parameters += parameter.global_shape.NumElements();
    plan.result_bytes += entry.bytes();
    plan.result.push_back({parameter.name, std::string(NameOf(dtype)), shape, entry.bytes(), absl::StrJoin(source->keys, ", ")});
    prepared->sources.push_back(*std::move(source));
    prepared->entries.push_back(entry);
  }
  if (missing.empty()) return absl::OkStatus();
  return MakeStatus(
      absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
      fmt::format("{}: tensors are missing that the model's arguments ask for: {}", prepared->model.path, FirstOf(missing)));
}

// Lists the source's tensors; those that no parameter uses must be known.
absl::Status ListTensors(const std::map<std::string, std::string>& used_by, PreparedImport* prepared) {
  ConversionPlan& plan = prepared->plan;
  std::vector<std::string> unknown;
  std::set<std::string> forms;  // All names that the parameters may have.
  for (const StreamedCheckpoint::Entry& entry : prepared->entries) {
    for (const StoredForm& form : StoredForms(entry.name, plan.model.num_layers, plan.model.num_moe_experts)) {
      for (const StoredPart& part : form) forms.insert(part.key);
    }
  }
  for (const auto& [key, tensor] : prepared->model.tensors) {
    const auto user = used_by.find(key);
    plan.source.push_back({key, tensor.type, tensor.shape, tensor.bytes(), user == used_by.end() ? "" : user->second});
    plan.source_bytes += tensor.bytes();
    if (user != used_by.end() || key.ends_with("_extra_state")) continue;
    if (key == kHead && plan.model.tied_embeddings) {
      plan.skipped.push_back(key + ": the last stage's copy of the tied table");
    } else if (key.starts_with("mtp.")) {
      plan.skipped.push_back(key + ": a module that predicts further tokens, which the engine does not have");
    } else if (forms.contains(key)) {
      plan.skipped.push_back(key + ": a parameter that is there by another name too");
    } else {
      unknown.push_back(key);
    }
  }
  if (!unknown.empty()) {
    return MakeStatus(
        absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
        fmt::format("{}: there are tensors that the model's arguments do not know: {}", prepared->model.path, FirstOf(unknown)));
  }
  return absl::OkStatus();
}

absl::StatusOr<PreparedImport> Prepare(const MegatronImportOptions& options) {
  PreparedImport prepared;
  MB_ASSIGN_OR_RETURN(prepared.model, OpenStoredModel(options.source, options.roots));
  ConversionPlan& plan = prepared.plan;
  MB_RETURN_IF_ERROR(ReadModel(options, &prepared));
  std::map<std::string, std::string> used_by;
  MB_RETURN_IF_ERROR(FindParameters(options, &prepared, &used_by));
  MB_RETURN_IF_ERROR(ListTensors(used_by, &prepared));
  const StoredModel& stored = prepared.model;
  plan.notes.push_back(fmt::format("{} of iteration {}", stored.path, stored.iteration));
  if (stored.optimizer_tensors > 0) {
    plan.notes.push_back(fmt::format(
        "the state of the optimizer ({}) is not taken: weights only",
        stored.format == "torch" ? "in the same files"
                                 : fmt::format("{} tensors of {} bytes", stored.optimizer_tensors, stored.optimizer_bytes)));
  }
  if (stored.other_objects > 0) {
    plan.notes.push_back(
        fmt::format("{} objects beside tensors are not taken (extra states, random states and the like)", stored.other_objects));
  }
  plan.notes.insert(plan.notes.end(), stored.notes.begin(), stored.notes.end());
  return prepared;
}

// Changes when a file of the source does.
std::string Fingerprint(const PreparedImport& prepared, const MegatronImportOptions& options) {
  std::set<std::string> files;
  for (const ParameterSource& source : prepared.sources) {
    for (const SourceBlock& block : source.blocks) files.insert(block.piece->file);
  }
  std::string facts = fmt::format("{} {}", prepared.model.path, options.dtype ? NameOf(*options.dtype) : "source");
  for (const std::string& file : files) {
    std::error_code error;
    const fs::path path = fs::path(prepared.model.path) / file;
    facts +=
        fmt::format(";{} {} {}", file, fs::file_size(path, error), fs::last_write_time(path, error).time_since_epoch().count());
  }
  return HashText(HashOf(facts));
}

}  // namespace

bool LooksLikeMegatron(const std::string& directory) {
  std::error_code error;
  for (const char* name : {kTrackerName, "metadata.json", "mp_rank_00", "mp_rank_00_000"}) {
    if (fs::exists(fmt::format("{}/{}", directory, name), error)) return true;
  }
  return false;
}

absl::StatusOr<ConversionPlan> PlanMegatronImport(const MegatronImportOptions& options) {
  MB_ASSIGN_OR_RETURN(PreparedImport prepared, Prepare(options));
  return std::move(prepared.plan);
}

absl::StatusOr<SavedCheckpoint> RunMegatronImport(const MegatronImportOptions& options, const ConversionObserver& observer) {
  MB_ASSIGN_OR_RETURN(const PreparedImport prepared, Prepare(options));
  ImportTarget target{.path = options.path,
                      .fingerprint = Fingerprint(prepared, options),
                      .meta = options.meta,
                      .entries = prepared.entries,
                      .read =
                          [&](int index, void* into) {
                            const StreamedCheckpoint::Entry& entry = prepared.entries[index];
                            return prepared.model.Read(prepared.sources[index], entry.shape, entry.dtype, into);
                          },
                      .add_files =
                          [&](const std::string& directory) {
                            return prepared.like ? WriteSourceRecord(directory, *prepared.like, {}) : absl::OkStatus();
                          }};
  if (options.config_text != nullptr) target.meta.config_text = options.config_text(prepared.plan.model);
  return WriteImport(target, observer);
}

absl::StatusOr<VerifiedConversion> VerifyMegatronConversion(const MegatronVerifyOptions& options,
                                                            const ConversionObserver& observer) {
  MegatronImportOptions as_import;
  as_import.source = options.source;
  as_import.like = options.like;
  as_import.roots = options.roots;
  MB_ASSIGN_OR_RETURN(const PreparedImport prepared, Prepare(as_import));
  MB_ASSIGN_OR_RETURN(const ManifestWithHash read, ReadManifest(options.checkpoint, options.manifest_hash));
  ShardReader reader(options.checkpoint, read.manifest);
  std::map<std::string, const ManifestTensor*> saved;
  for (const ManifestTensor& tensor : read.manifest.tensors) saved[tensor.name] = &tensor;
  VerifiedConversion verified;
  ConversionProgress progress{.tensors = 0,
                              .total_tensors = static_cast<int64_t>(prepared.entries.size()),
                              .bytes = 0,
                              .total_bytes = prepared.plan.result_bytes};
  ByteBuffer ours, theirs;
  for (size_t i = 0; i < prepared.entries.size(); ++i) {
    MB_RETURN_IF_ERROR(CheckStop(observer));
    const StreamedCheckpoint::Entry& entry = prepared.entries[i];
    const auto found = saved.find(entry.name);
    bool same = found != saved.end() && found->second->shape == entry.shape && found->second->dtype == entry.dtype;
    if (same) {
      MB_RETURN_IF_ERROR(ours.Resize(entry.bytes()));
      MB_RETURN_IF_ERROR(theirs.Resize(entry.bytes()));
      const Part whole{entry.shape, entry.shape, -1, 0, 0, entry.shape.NumElements()};
      MB_RETURN_IF_ERROR(ReadPart(reader, *found->second, whole, entry.dtype, ours.data()));
      MB_RETURN_IF_ERROR(prepared.model.Read(prepared.sources[i], entry.shape, entry.dtype, theirs.data()));
      same = std::memcmp(ours.data(), theirs.data(), static_cast<size_t>(entry.bytes())) == 0;
    }
    if (!same) verified.different.push_back(entry.name);
    verified.bytes += entry.bytes();
    progress.tensors = ++verified.tensors;
    progress.bytes = verified.bytes;
    if (observer.progress != nullptr) observer.progress(progress);
  }
  if (options.logits.empty()) return verified;
  const GptConfig& model = prepared.plan.model;
  MB_ASSIGN_OR_RETURN(verified.logits_difference,
                      CompareLogits(options.logits, options.checkpoint, options.manifest_hash, model, model.padded_vocab_size));
  return verified;
}

}  // namespace mbridge
