// A checkpoint against the model that it was imported from.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/exported_tensors.h"
#include "engine/core/error.h"
#include "engine/model/gpt_model.h"

namespace mbridge {
namespace {

template <class T>
absl::StatusOr<std::vector<T>> ReadArray(const SafetensorsFile& file, const std::string& name, const char* dtype, size_t rank) {
  const SafetensorsEntry* entry = file.Find(name);
  if (entry == nullptr || entry->dtype != dtype || entry->shape.size() != rank) {
    return InvalidFields(
        v1::REASON_INVALID_REQUEST,
        {{"logits", fmt::format("{} needs a tensor {} of dtype {} with {} axes", file.path(), name, dtype, rank)}});
  }
  std::vector<T> values(static_cast<size_t>(entry->NumElements()));
  MB_RETURN_IF_ERROR(file.Read(*entry, values.data()));
  return values;
}

// Fills a model of fp32 with the checkpoint's weights.
absl::Status LoadWeights(const VerifyConversionOptions& options, const ParameterStore& store) {
  MB_ASSIGN_OR_RETURN(const ManifestWithHash read, ReadManifest(options.checkpoint, options.manifest_hash));
  ShardReader reader(options.checkpoint, read.manifest);
  for (const ManifestTensor& saved : read.manifest.tensors) {
    const int index = store.Find(saved.name);
    if (index < 0) continue;
    const Part whole{saved.shape, saved.shape, -1, 0, 0, saved.shape.NumElements()};
    MB_RETURN_IF_ERROR(ReadPart(reader, saved, whole, DType::kF32, store[index].value.data));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> CompareLogits(const VerifyConversionOptions& options, GptConfig config, int64_t vocab_size) {
  MB_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(options.logits));
  MB_ASSIGN_OR_RETURN(const std::vector<int64_t> ids, ReadArray<int64_t>(file, "input_ids", "I64", 2));
  MB_ASSIGN_OR_RETURN(const std::vector<float> expected, ReadArray<float>(file, "logits", "F32", 3));
  const int64_t rows = file.Find("input_ids")->shape[0], length = file.Find("input_ids")->shape[1];
  if (file.Find("logits")->shape != std::vector<int64_t>{rows, length, vocab_size}) {
    return InvalidFields(v1::REASON_INVALID_REQUEST,
                         {{"logits", fmt::format("{}: logits must be [{}, {}, {}]", options.logits, rows, length, vocab_size)}});
  }
  config.seq_length = length;
  config.dtype = DType::kF32;
  GptModel model(config, nullptr);
  ParameterStore store(DType::kF32, DeviceType::kCpu);
  model.DeclareParameters(&store);
  store.Allocate();
  MB_RETURN_IF_ERROR(LoadWeights(options, store));
  model.Prepare(store, 1);
  std::vector<float> logits(static_cast<size_t>(length * config.padded_vocab_size));
  std::vector<int32_t> tokens(static_cast<size_t>(length)), positions(static_cast<size_t>(length));
  double largest = 0, difference = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < length; ++i) {
      tokens[i] = static_cast<int32_t>(ids[row * length + i]);
      positions[i] = static_cast<int32_t>(i);
    }
    model.Logits(tokens.data(), positions.data(),
                 {logits.data(), DType::kF32, DeviceType::kCpu, {length, 1, config.padded_vocab_size}});
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t token = 0; token < vocab_size; ++token) {
        const double theirs = expected[(row * length + i) * vocab_size + token];
        largest = std::max(largest, std::fabs(theirs));
        difference = std::max(difference, std::fabs(logits[i * config.padded_vocab_size + token] - theirs));
      }
    }
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace

absl::StatusOr<VerifiedConversion> VerifyConversion(const VerifyConversionOptions& options, const ConversionObserver& observer) {
  MB_ASSIGN_OR_RETURN(const std::string path, FindModelDirectory(options.source));
  MB_ASSIGN_OR_RETURN(const ModelDirectory directory, ModelDirectory::Open(path, options.roots));
  MB_ASSIGN_OR_RETURN(const ImportedModel model, OpenModel(directory, 1));
  MB_ASSIGN_OR_RETURN(const auto exported, ExportSource::Open({.checkpoint = options.checkpoint,
                                                               .manifest_hash = options.manifest_hash,
                                                               .path = "",
                                                               .like = path,
                                                               .model_type = "",
                                                               .roots = options.roots,
                                                               .dtype = std::nullopt,
                                                               .vocab_size = 0,
                                                               .shard_bytes = 0,
                                                               .model = std::nullopt}));
  VerifiedConversion verified;
  ConversionProgress progress{.tensors = 0,
                              .total_tensors = static_cast<int64_t>(exported->mappings().size()),
                              .bytes = 0,
                              .total_bytes = directory.bytes()};
  ByteBuffer theirs;
  for (const TensorMapping& mapping : exported->mappings()) {
    MB_RETURN_IF_ERROR(CheckStop(observer));
    MB_RETURN_IF_ERROR(exported->Load(mapping));
    for (int i = 0; i < static_cast<int>(mapping.theirs.size()); ++i) {
      MB_ASSIGN_OR_RETURN(const auto source, SourceTensor::Open(directory, mapping.theirs[i].name));
      MB_ASSIGN_OR_RETURN(const ExportedPiece piece, exported->Piece(mapping, i, std::string(NameOf(source->type()))));
      const auto width = static_cast<int64_t>(SizeOf(source->type()));
      MB_RETURN_IF_ERROR(theirs.Resize(piece.bytes));
      MB_RETURN_IF_ERROR(source->Read(piece.offset / width, piece.bytes / width, source->type(), theirs.data()));
      verified.bytes += piece.bytes;
      if (std::memcmp(theirs.data(), piece.data, static_cast<size_t>(piece.bytes)) != 0 &&
          (verified.different.empty() || verified.different.back() != mapping.theirs[i].name)) {
        verified.different.push_back(mapping.theirs[i].name);
      }
    }
    ++verified.tensors;
    progress.tensors = verified.tensors;
    progress.bytes = verified.bytes;
    if (observer.progress != nullptr) observer.progress(progress);
  }
  if (options.logits.empty()) return verified;
  try {
    GptConfig config = model.config;
    for (const TensorMapping& mapping : exported->mappings()) {
      if (mapping.ours == "embedding.word_embeddings.weight") config.padded_vocab_size = mapping.shape[0];
    }
    MB_ASSIGN_OR_RETURN(verified.logits_difference, CompareLogits(options, config, model.vocab_size));
  } catch (const EngineError& error) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, error.reason(), error.what());
  }
  return verified;
}

}  // namespace mbridge
