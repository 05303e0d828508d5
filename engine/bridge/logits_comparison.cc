#include "engine/bridge/logits_comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "engine/bridge/safetensors.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/core/error.h"
#include "engine/model/gpt_model.h"
#include "proto/rpc/status_details.h"

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
absl::Status LoadWeights(const std::string& checkpoint, const std::string& manifest_hash, const ParameterStore& store) {
  MB_ASSIGN_OR_RETURN(const ManifestWithHash read, ReadManifest(checkpoint, manifest_hash));
  ShardReader reader(checkpoint, read.manifest);
  for (const ManifestTensor& saved : read.manifest.tensors) {
    const int index = store.Find(saved.name);
    if (index < 0) continue;
    const Part whole{saved.shape, saved.shape, -1, 0, 0, saved.shape.NumElements()};
    MB_RETURN_IF_ERROR(ReadPart(reader, saved, whole, DType::kF32, store[index].value.data));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Compare(const std::string& path, const std::string& checkpoint, const std::string& manifest_hash,
                               GptConfig config, int64_t vocab_size) {
  MB_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  MB_ASSIGN_OR_RETURN(const std::vector<int64_t> ids, ReadArray<int64_t>(file, "input_ids", "I64", 2));
  MB_ASSIGN_OR_RETURN(const std::vector<float> expected, ReadArray<float>(file, "logits", "F32", 3));
  const int64_t rows = file.Find("input_ids")->shape[0], length = file.Find("input_ids")->shape[1];
  if (file.Find("logits")->shape != std::vector<int64_t>{rows, length, vocab_size}) {
    return InvalidFields(v1::REASON_INVALID_REQUEST,
                         {{"logits", fmt::format("{}: logits must be [{}, {}, {}]", path, rows, length, vocab_size)}});
  }
  config.seq_length = length;
  config.dtype = DType::kF32;
  GptModel model(config, nullptr);
  ParameterStore store(DType::kF32, DeviceType::kCpu);
  model.DeclareParameters(&store);
  store.Allocate();
  MB_RETURN_IF_ERROR(LoadWeights(checkpoint, manifest_hash, store));
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
        const double apart = std::fabs(logits[i * config.padded_vocab_size + token] - theirs);
        if (!std::isfinite(apart)) return std::numeric_limits<double>::infinity();
        largest = std::max(largest, std::fabs(theirs));
        difference = std::max(difference, apart);
      }
    }
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace

absl::StatusOr<double> CompareLogits(const std::string& path, const std::string& checkpoint, const std::string& manifest_hash,
                                     const GptConfig& config, int64_t vocab_size) {
  try {
    return Compare(path, checkpoint, manifest_hash, config, vocab_size);
  } catch (const EngineError& error) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, error.reason(), error.what());
  }
}

}  // namespace mbridge
