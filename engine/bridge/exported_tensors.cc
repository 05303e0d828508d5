#include "engine/bridge/exported_tensors.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <xxhash.h>

#include "engine/bridge/element_type.h"

namespace mbridge {
namespace {

const std::map<std::string, std::string> kTags = {
    {"F32", "float32"}, {"BF16", "bfloat16"}, {"F16", "float16"}, {"F64", "float64"}};

// `option`: of ExportOptions, the one to change.
absl::Status Unfit(const char* option, const std::string& message) {
  return InvalidFields(v1::REASON_INVALID_REQUEST, {{option, message}});
}

constexpr const char* kCheckpoint = "checkpoint";

int64_t ElementsOf(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// Copies of one source that fill a stretch of it without holes, in any order.
bool FillsExtent(const TensorMapping& mapping, int source, const Extent& extent) {
  int64_t elements = 0;
  for (const StridedCopy& copy : mapping.copies) elements += copy.source == source ? copy.rows * copy.columns : 0;
  return elements == extent.end - extent.begin;
}

}  // namespace

int64_t OutputTensor::bytes() const { return ElementsOf(shape) * SafetensorsElementBytes(dtype); }

absl::StatusOr<std::unique_ptr<ExportSource>> ExportSource::Open(const ExportOptions& options) {
  std::unique_ptr<ExportSource> source(new ExportSource());
  MB_ASSIGN_OR_RETURN(source->manifest_, ReadManifest(options.checkpoint, options.manifest_hash));
  source->reader_ = std::make_unique<ShardReader>(options.checkpoint, source->manifest_.manifest);
  for (const ManifestTensor& tensor : source->manifest_.manifest.tensors) {
    if (!tensor.name.starts_with(kOptimizerStatePrefix)) source->saved_[tensor.name] = &tensor;
  }
  MB_RETURN_IF_ERROR(source->Choose(options));
  MB_RETURN_IF_ERROR(source->CheckTensors());
  MB_RETURN_IF_ERROR(source->PlanTensors(options));
  MB_RETURN_IF_ERROR(source->WriteConfig(options));
  return source;
}

absl::Status ExportSource::Choose(const ExportOptions& options) {
  absl::StatusOr<SourceRecord> record = ReadSourceRecord(options.like.empty() ? options.checkpoint : options.like, options.roots);
  const bool own = options.like.empty();
  if (record.ok()) {
    record_ = *std::move(record);
    MB_ASSIGN_OR_RETURN(architecture_, ArchitectureOf(record_.config));
  } else if (!own) {
    return InvalidFields(ReasonOf(record.status()), {{"like", std::string(record.status().message())}});
  } else if (!options.model_type.empty() && options.model) {
    MB_ASSIGN_OR_RETURN(architecture_, FindArchitecture(options.model_type));
  } else {
    return Unfit(
        "like",
        fmt::format("{} was not imported, so that its family is not known: give --like with a Hugging Face directory, or with an "
                    "imported checkpoint, of this model, or --model-type",
                    options.checkpoint));
  }
  if (!options.model_type.empty() && options.model_type != architecture_->model_type) {
    MB_ASSIGN_OR_RETURN(architecture_, FindArchitecture(options.model_type));
  }
  if (record_.config.is_object()) {
    MB_ASSIGN_OR_RETURN(config_, ReadModelConfig(*architecture_, record_.config));
    vocab_size_ = config_.padded_vocab_size;
  }
  if (options.model) {
    const int64_t advertised = config_.max_position_embeddings;
    config_ = *options.model;
    config_.dtype = DType::kF32;
    if (advertised > 0 && config_.position_embedding != PositionKind::kLearnedAbsolute)
      config_.max_position_embeddings = advertised;
  }
  if (options.vocab_size > 0) vocab_size_ = options.vocab_size;
  const auto words = saved_.find("embedding.word_embeddings.weight");
  if (words == saved_.end()) return Unfit(kCheckpoint, fmt::format("{} holds no language model", options.checkpoint));
  config_.padded_vocab_size = words->second->shape[0];
  if (vocab_size_ == 0) vocab_size_ = config_.padded_vocab_size;
  if (vocab_size_ > config_.padded_vocab_size) {
    return Unfit("vocab_size", fmt::format("the vocabulary of {} tokens is larger than the checkpoint's {}", vocab_size_,
                                           config_.padded_vocab_size));
  }
  return absl::OkStatus();
}

absl::Status ExportSource::CheckTensors() {
  MB_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> parameters, ModelParameters(config_));
  std::set<std::string> known;
  for (const ParameterSpec& parameter : parameters) {
    known.insert(parameter.name);
    const auto saved = saved_.find(parameter.name);
    if (saved == saved_.end())
      return Unfit(kCheckpoint, fmt::format("has no tensor {}, which the model of config.json has", parameter.name));
    if (saved->second->shape != parameter.global_shape) {
      return Unfit(kCheckpoint, fmt::format("has tensor {} of shape {}, which is {} in the model of config.json", parameter.name,
                                            saved->second->shape.ToString(), parameter.global_shape.ToString()));
    }
  }
  for (const auto& [name, tensor] : saved_) {
    if (!known.contains(name))
      return Unfit(kCheckpoint, fmt::format("has a tensor {}, which the model of config.json lacks", name));
  }
  MB_ASSIGN_OR_RETURN(mappings_, MapModel(*architecture_, config_, parameters, vocab_size_));
  std::vector<std::string> names;
  for (const SourceRecord::Entry& entry : record_.tensors) names.push_back(entry.name);
  if (LacksPrefix(*architecture_, names)) RemovePrefix(*architecture_, &mappings_);
  return absl::OkStatus();
}

absl::Status ExportSource::PlanTensors(const ExportOptions& options) {
  std::map<std::string, SourceRecord::Entry> recorded;
  std::map<std::string, size_t> rank;
  for (const SourceRecord::Entry& entry : record_.tensors) {
    rank[entry.name] = recorded.size();
    recorded[entry.name] = entry;
  }
  // A tied head that the source stored is written again.
  std::vector<TensorMapping> repeated;
  for (const SourceRecord::Entry& entry : record_.tensors) {
    if (entry.same_as.empty()) continue;
    for (const TensorMapping& mapping : mappings_) {
      if (mapping.theirs.size() != 1 || mapping.theirs[0].name != entry.same_as) continue;
      repeated.push_back(mapping);
      repeated.back().theirs[0].name = entry.name;
    }
  }
  std::move(repeated.begin(), repeated.end(), std::back_inserter(mappings_));

  std::set<std::string> seen;
  for (const TensorMapping& mapping : mappings_) {
    const DType own = saved_.at(mapping.ours)->dtype;
    for (const TheirTensor& tensor : mapping.theirs) {
      if (!seen.insert(tensor.name).second) continue;
      const auto known = recorded.find(tensor.name);
      std::string dtype = known == recorded.end() ? std::string(NameOf(own)) : known->second.dtype;
      const bool whole_numbers = own == DType::kI32 || own == DType::kI64 || own == DType::kU8;
      if (options.dtype && !whole_numbers) dtype = std::string(NameOf(*options.dtype));
      if (SafetensorsElementBytes(dtype) == 0)
        return Unfit("like", fmt::format("tensor {} has no type \"{}\"", tensor.name, dtype));
      tensors_.push_back({tensor.name, dtype, tensor.shape});
    }
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [&](const OutputTensor& a, const OutputTensor& b) {
    const auto at = [&](const OutputTensor& tensor) { return rank.contains(tensor.name) ? rank.at(tensor.name) : rank.size(); };
    return at(a) < at(b);
  });
  return absl::OkStatus();
}

absl::Status ExportSource::WriteConfig(const ExportOptions& options) {
  MB_ASSIGN_OR_RETURN(written_config_, WriteModelConfig(*architecture_, config_, vocab_size_, record_.config));
  written_config_.erase("quantization_config");
  std::map<std::string, int64_t> bytes;
  for (const OutputTensor& tensor : tensors_) bytes[tensor.dtype] += tensor.bytes();
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const bool types_changed = options.dtype || record_.tensors.empty() || written_config_.size() != record_.config.size();
  if (most != bytes.end() && kTags.contains(most->first) && types_changed) {
    written_config_[written_config_.contains("torch_dtype") ? "torch_dtype" : "dtype"] = kTags.at(most->first);
  }
  return absl::OkStatus();
}

std::string ExportSource::ConfigText() const {
  if (written_config_ == record_.config) return record_.config_text;
  return written_config_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ExportSource::Fingerprint(int64_t shard_bytes) const {
  std::string facts = fmt::format("{};{};{};", manifest_.hash, shard_bytes, ConfigText());
  for (const OutputTensor& tensor : tensors_) facts += fmt::format("{},{};", tensor.name, tensor.dtype);
  return fmt::format("{:016x}", XXH3_64bits(facts.data(), facts.size()));
}

ConversionPlan ExportSource::Plan() const {
  ConversionPlan plan;
  plan.model_type = architecture_->model_type;
  plan.model = config_;
  plan.vocab_size = vocab_size_;
  plan.notes = notes_;
  std::map<std::string, std::string> used_by;
  for (const TensorMapping& mapping : mappings_) {
    const ManifestTensor& tensor = *saved_.at(mapping.ours);
    ListedTensor listed{tensor.name,
                        std::string(NameOf(tensor.dtype)),
                        {},
                        tensor.shape.NumElements() * static_cast<int64_t>(SizeOf(tensor.dtype)),
                        ""};
    for (int axis = 0; axis < tensor.shape.rank(); ++axis) listed.shape.push_back(tensor.shape[axis]);
    for (const TheirTensor& theirs : mapping.theirs) {
      listed.used_by += (listed.used_by.empty() ? "" : ", ") + theirs.name;
      std::string& users = used_by[theirs.name];
      users += (users.empty() ? "" : ", ") + mapping.ours;
    }
    plan.parameters += tensor.shape.NumElements();
    plan.source_bytes += listed.bytes;
    plan.source.push_back(std::move(listed));
  }
  for (const OutputTensor& tensor : tensors_) {
    plan.result.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes(), used_by[tensor.name]});
    plan.result_bytes += tensor.bytes();
  }
  return plan;
}

absl::Status ExportSource::Load(const TensorMapping& mapping) {
  const ManifestTensor* saved = saved_.at(mapping.ours);
  if (saved == loaded_) return absl::OkStatus();
  loaded_ = nullptr;
  MB_RETURN_IF_ERROR(ours_.Resize(saved->shape.NumElements() * static_cast<int64_t>(SizeOf(saved->dtype))));
  const Part whole{saved->shape, saved->shape, -1, 0, 0, saved->shape.NumElements()};
  MB_RETURN_IF_ERROR(ReadPart(*reader_, *saved, whole, saved->dtype, ours_.data()));
  loaded_ = saved;
  return absl::OkStatus();
}

absl::StatusOr<ExportedPiece> ExportSource::Piece(const TensorMapping& mapping, int source, const std::string& dtype) {
  const auto own_width = static_cast<int64_t>(SizeOf(loaded_->dtype)), width = SafetensorsElementBytes(dtype);
  const Extent extent = ExtentOf(mapping, source);
  if (!FillsExtent(mapping, source, extent)) {
    return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                      fmt::format("{} is only a part of {} with holes", mapping.ours, mapping.theirs[source].name));
  }
  const int64_t elements = extent.end - extent.begin;
  const TensorMapping only = OnlySource(mapping, source, extent.begin);
  const void* data = nullptr;
  const bool as_it_is = only.copies.size() == 1 && only.copies[0].their_column == 1 &&
                        only.copies[0].their_row == only.copies[0].columns && only.copies[0].ours_row == only.copies[0].columns;
  if (as_it_is) {
    data = ours_.data() + only.copies[0].ours_begin * own_width;
  } else {
    MB_RETURN_IF_ERROR(theirs_.Resize(elements * own_width));
    ExportTensor(only, ours_.data(), {theirs_.data()}, static_cast<size_t>(own_width));
    data = theirs_.data();
  }
  if (dtype != NameOf(loaded_->dtype)) {
    MB_RETURN_IF_ERROR(converted_.Resize(elements * width));
    if (!ConvertToFormat(loaded_->dtype, data, dtype, converted_.data(), elements)) {
      return Unfit("dtype", fmt::format("tensor {} is {} and cannot become {}", mapping.ours, NameOf(loaded_->dtype), dtype));
    }
    data = converted_.data();
  }
  return ExportedPiece{extent.begin * width, elements * width, data};
}

}  // namespace mbridge
