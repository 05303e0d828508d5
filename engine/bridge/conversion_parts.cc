#include "engine/bridge/conversion_parts.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <new>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/element_type.h"
#include "engine/core/file.h"

namespace mbridge {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return fmt::format("[{}]", absl::StrJoin(shape, ", ")); }

bool Contiguous(const StridedCopy& copy) {
  return copy.their_column == 1 && copy.ours_row == copy.columns && (copy.their_row == copy.columns || copy.rows == 1);
}

// Elements of ours that copies fill.
int64_t Covered(const TensorMapping& mapping) {
  int64_t covered = 0;
  for (const StridedCopy& copy : mapping.copies) covered += copy.rows * copy.columns;
  return covered;
}

// Whether two plain tensors hold the same bytes.
absl::StatusOr<bool> SameBytes(const ModelDirectory::Place& a, const ModelDirectory::Place& b) {
  if (a.entry->dtype != b.entry->dtype || a.entry->shape != b.entry->shape) return false;
  constexpr int64_t kChunk = int64_t{4} << 20;
  std::vector<char> left(kChunk), right(kChunk);
  for (int64_t done = 0; done < a.entry->bytes; done += kChunk) {
    SafetensorsEntry from_a = *a.entry, from_b = *b.entry;
    from_a.offset += done;
    from_b.offset += done;
    from_a.bytes = from_b.bytes = std::min(kChunk, a.entry->bytes - done);
    MB_RETURN_IF_ERROR(a.file->Read(from_a, left.data()));
    MB_RETURN_IF_ERROR(b.file->Read(from_b, right.data()));
    if (std::memcmp(left.data(), right.data(), static_cast<size_t>(from_a.bytes)) != 0) return false;
  }
  return true;
}

struct Findings {
  std::vector<std::string> missing, misshapen, denied;

  absl::Status AsStatus(const std::string& path) const {
    std::vector<FieldViolation> wrong;
    const auto add = [&](const std::vector<std::string>& names, const std::string& what) {
      if (!names.empty()) wrong.push_back({path, fmt::format("{}: {}", what, absl::StrJoin(names, ", "))});
    };
    add(missing, "tensors are missing");
    add(misshapen, "tensors have another shape than config.json says");
    add(denied, "tensors are there although config.json says that the model has none such");
    if (wrong.empty()) return absl::OkStatus();
    return InvalidFields(missing.empty() ? v1::REASON_UNSUPPORTED_MODEL : v1::REASON_INVALID_REQUEST, wrong);
  }
};

absl::Status CheckSources(const ModelDirectory& directory, const ImportedModel& model, std::set<std::string>* used,
                          Findings* findings) {
  for (const TensorMapping& mapping : model.mappings) {
    for (const TheirTensor& tensor : mapping.theirs) {
      if (!used->insert(tensor.name).second) continue;
      const auto source = SourceTensor::Open(directory, tensor.name);
      if (absl::IsNotFound(source.status())) {
        findings->missing.push_back(tensor.name);
        continue;
      }
      MB_RETURN_IF_ERROR(source.status());
      if ((*source)->stored_dtype().starts_with("F8_") && !(*source)->quantised() &&
          directory.config().contains("quantization_config")) {
        return MakeStatus(
            absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
            fmt::format("tensor {} is {} without scales ({}_scale_inv)", tensor.name, (*source)->stored_dtype(), tensor.name));
      }
      if ((*source)->shape() != tensor.shape) {
        findings->misshapen.push_back(
            fmt::format("{} {} instead of {}", tensor.name, ShapeText((*source)->shape()), ShapeText(tensor.shape)));
      }
    }
  }
  return absl::OkStatus();
}

// A tensor of a layer after the last one, where config.json says that the model predicts further tokens with such layers.
bool IsOfNextTokenLayer(const Json& config, int64_t num_layers, const std::string& name) {
  constexpr std::string_view kLayers = "model.layers.";
  const Json count = config.value("num_nextn_predict_layers", Json());
  if (!count.is_number_integer() || !name.starts_with(kLayers)) return false;
  int64_t layer = -1;
  std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer >= num_layers && layer < num_layers + count.get<int64_t>();
}

// Sorts what no parameter uses: repeated, skipped or wrong.
absl::Status CheckExtras(const ModelDirectory& directory, const std::set<std::string>& used, ImportedModel* model,
                         Findings* findings) {
  for (const SafetensorsFile& file : directory.files()) {
    for (const SafetensorsEntry& entry : file.entries()) {
      if (used.contains(entry.name)) continue;
      if (const std::string owner = QuantisedOwner(entry.name); !owner.empty() && used.contains(owner)) continue;
      if (IsOfNextTokenLayer(directory.config(), model->config.num_layers, entry.name)) {
        model->skipped.push_back(entry.name + ": of a layer that predicts further tokens, which is not trained here");
        continue;
      }
      bool repeated = false;
      for (const TensorMapping& mapping : model->mappings) {
        // Only a tensor that the model has twice can be tied: the word embedding, whose shape the head shares.
        if (mapping.theirs.size() != 1 || mapping.theirs[0].shape != entry.shape || entry.shape.size() != 2) continue;
        const ModelDirectory::Place other = directory.Find(mapping.theirs[0].name);
        if (other.entry == nullptr) continue;
        MB_ASSIGN_OR_RETURN(repeated, SameBytes({&file, &entry}, other));
        if (!repeated) continue;
        model->aliases[entry.name] = mapping.theirs[0].name;
        break;
      }
      if (repeated) continue;
      switch (ClassifyExtra(*model->architecture, entry.name)) {
        case ExtraTensor::kUnused: model->skipped.push_back(entry.name + ": not needed, it follows from config.json"); break;
        case ExtraTensor::kUnknown: model->skipped.push_back(entry.name + ": not a part of the model"); break;
        case ExtraTensor::kDenied: findings->denied.push_back(entry.name); break;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckQuantisation(const Json& config) {
  const Json method = config.value("quantization_config", Json::object()).value("quant_method", Json("fp8"));
  if (method == "fp8" || method == "mxfp4") return absl::OkStatus();
  return InvalidFields(v1::REASON_UNSUPPORTED_MODEL,
                       {{"config.json: quantization_config/quant_method",
                         fmt::format("is {}: supported are fp8 with blocks and mxfp4", method.dump())}});
}

}  // namespace

absl::Status ByteBuffer::Resize(int64_t bytes) {
  if (bytes <= capacity_) return absl::OkStatus();
  memory_.reset();
  memory_.reset(new (std::nothrow) char[static_cast<size_t>(bytes)]);
  capacity_ = memory_ == nullptr ? 0 : bytes;
  if (memory_ != nullptr) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kResourceExhausted, v1::REASON_OUT_OF_MEMORY,
                    fmt::format("a tensor needs {} bytes of memory", bytes));
}

absl::StatusOr<ImportedModel> OpenModel(const ModelDirectory& directory, int64_t vocab_multiple) {
  ImportedModel model;
  MB_ASSIGN_OR_RETURN(model.architecture, ArchitectureOf(directory.config()));
  MB_RETURN_IF_ERROR(CheckQuantisation(directory.config()));
  MB_ASSIGN_OR_RETURN(model.config, ReadModelConfig(*model.architecture, directory.config()));
  model.vocab_size = model.config.padded_vocab_size;
  model.config.padded_vocab_size = (model.vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple;
  MB_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> parameters, ModelParameters(model.config));
  MB_ASSIGN_OR_RETURN(model.mappings, MapModel(*model.architecture, model.config, parameters, model.vocab_size));
  std::vector<std::string> names;
  for (const SafetensorsFile& file : directory.files()) {
    for (const SafetensorsEntry& entry : file.entries()) names.push_back(entry.name);
  }
  if (LacksPrefix(*model.architecture, names)) RemovePrefix(*model.architecture, &model.mappings);
  Findings findings;
  std::set<std::string> used;
  MB_RETURN_IF_ERROR(CheckSources(directory, model, &used, &findings));
  MB_RETURN_IF_ERROR(CheckExtras(directory, used, &model, &findings));
  MB_RETURN_IF_ERROR(findings.AsStatus(directory.path()));
  return model;
}

absl::StatusOr<DType> TypeOf(const ModelDirectory& directory, const TensorMapping& mapping, std::optional<DType> wanted) {
  std::optional<DType> type;
  for (const TheirTensor& tensor : mapping.theirs) {
    MB_ASSIGN_OR_RETURN(const auto source, SourceTensor::Open(directory, tensor.name));
    type = type ? WiderType(*type, source->type()) : source->type();
    if (!type) {
      return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
                        fmt::format("{} is made of whole and of floating-point numbers", mapping.ours));
    }
  }
  const bool is_float = *type != DType::kI32 && *type != DType::kI64 && *type != DType::kU8;
  return wanted && is_float ? *wanted : *type;
}

absl::Status ReadMapped(const ModelDirectory& directory, const TensorMapping& mapping, DType dtype, void* ours) {
  const size_t width = SizeOf(dtype);
  char* target = static_cast<char*>(ours);
  if (Covered(mapping) != mapping.shape.NumElements())
    std::memset(target, 0, static_cast<size_t>(mapping.shape.NumElements()) * width);
  for (int source = 0; source < static_cast<int>(mapping.theirs.size()); ++source) {
    MB_ASSIGN_OR_RETURN(const auto tensor, SourceTensor::Open(directory, mapping.theirs[source].name));
    bool all_contiguous = true;
    for (const StridedCopy& copy : mapping.copies) all_contiguous &= copy.source != source || Contiguous(copy);
    if (all_contiguous) {
      for (const StridedCopy& copy : mapping.copies) {
        if (copy.source != source) continue;
        MB_RETURN_IF_ERROR(tensor->Read(copy.their_begin, copy.rows * copy.columns, dtype,
                                        target + copy.ours_begin * static_cast<int64_t>(width)));
      }
      continue;
    }
    const Extent extent = ExtentOf(mapping, source);
    ByteBuffer theirs;
    MB_RETURN_IF_ERROR(theirs.Resize((extent.end - extent.begin) * static_cast<int64_t>(width)));
    MB_RETURN_IF_ERROR(tensor->Read(extent.begin, extent.end - extent.begin, dtype, theirs.data()));
    ImportTensor(OnlySource(mapping, source, extent.begin), {theirs.data()}, ours, width);
  }
  return absl::OkStatus();
}

Extent ExtentOf(const TensorMapping& mapping, int source) {
  Extent extent{-1, 0};
  for (const StridedCopy& copy : mapping.copies) {
    if (copy.source != source) continue;
    const int64_t last = copy.their_begin + (copy.rows - 1) * copy.their_row + (copy.columns - 1) * copy.their_column;
    extent.begin = extent.begin < 0 ? copy.their_begin : std::min(extent.begin, copy.their_begin);
    extent.end = std::max(extent.end, last + 1);
  }
  return extent;
}

TensorMapping OnlySource(const TensorMapping& mapping, int source, int64_t extent_begin) {
  TensorMapping only{
      .ours = mapping.ours, .shape = mapping.shape, .theirs = {mapping.theirs[source]}, .copies = {}, .whole = mapping.whole};
  for (StridedCopy copy : mapping.copies) {
    if (copy.source != source) continue;
    copy.source = 0;
    copy.their_begin -= extent_begin;
    only.copies.push_back(copy);
  }
  return only;
}

absl::Status CheckStop(const ConversionObserver& observer) {
  if (observer.stop == nullptr || !observer.stop->load()) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kCancelled, v1::REASON_CANCELLED_BY_USER,
                    "the conversion was stopped; the same command goes on with it");
}

absl::StatusOr<SavedCheckpoint> WriteImport(const ImportTarget& target, const ConversionObserver& observer) {
  CheckpointMeta meta = target.meta;
  meta.step = 0;
  meta.has_optimizer_state = false;
  MB_RETURN_IF_ERROR(MakeDirectories(ParentDirectory(target.path)));
  MB_ASSIGN_OR_RETURN(StreamedCheckpoint checkpoint,
                      StreamedCheckpoint::Open({.path = target.path, .fingerprint = target.fingerprint}, meta, target.entries));
  ConversionProgress progress{.tensors = checkpoint.tensors_taken_over(),
                              .total_tensors = static_cast<int64_t>(target.entries.size()),
                              .bytes = checkpoint.bytes_taken_over(),
                              .total_bytes = 0};
  for (const StreamedCheckpoint::Entry& entry : target.entries) progress.total_bytes += entry.bytes();
  if (observer.progress != nullptr) observer.progress(progress);
  ByteBuffer bytes;
  while (checkpoint.next() >= 0) {
    MB_RETURN_IF_ERROR(CheckStop(observer));
    const int64_t size = checkpoint.entry(checkpoint.next()).bytes();
    MB_RETURN_IF_ERROR(bytes.Resize(size));
    MB_RETURN_IF_ERROR(target.read(checkpoint.next(), bytes.data()));
    MB_RETURN_IF_ERROR(checkpoint.Write(bytes.data()));
    ++progress.tensors;
    progress.bytes += size;
    if (observer.progress != nullptr) observer.progress(progress);
  }
  MB_RETURN_IF_ERROR(target.add_files(checkpoint.directory()));
  return checkpoint.Commit();
}

}  // namespace mbridge
