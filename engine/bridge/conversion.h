// Conversion between Hugging Face directories and our checkpoints, tensor by tensor: memory for a few tensors, whatever the size
// of the model. Both directions are atomic (temporary sibling, rename), can be stopped between tensors and go on later with the
// data files that were finished.
//
// Beside the data of an imported checkpoint lies the folder `hugging_face`: config.json, generation_config.json and tokenizer as
// they were, and source.json (names, types and order of the source's tensors), from which an export makes the same again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/architecture.h"
#include "engine/bridge/model_directory.h"
#include "engine/checkpoint/checkpoint.h"

namespace mbridge {

inline constexpr const char* kHuggingFaceFolder = "hugging_face";

struct ConversionProgress {
  int64_t tensors = 0, total_tensors = 0;  // Of the side that is written.
  int64_t bytes = 0, total_bytes = 0;
};

// Called by the converting thread.
struct ConversionObserver {
  std::function<void(const ConversionProgress&)> progress;  // After each tensor. May be null.
  const std::atomic<bool>* stop = nullptr;                  // Set: the conversion ends with CANCELLED (CANCELLED_BY_USER).
};

// A tensor of the source or of the result.
struct ListedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::string used_by;  // The parameters or files that it goes to.
};

// What a conversion will do; the result of a dry run and of `inspect`.
struct ConversionPlan {
  std::string model_type;
  GptConfig model;         // FP32, without batch sizes.
  int64_t parameters = 0;  // Of the model, tied ones once.
  int64_t vocab_size = 0;  // Without padding.
  std::vector<ListedTensor> source, result;
  std::vector<std::string> skipped;  // Tensors of the source that nothing uses, with the reason.
  std::vector<std::string> notes;
  int64_t source_bytes = 0, result_bytes = 0;
};

struct ImportOptions {
  std::string source;          // Directory, or org/name of the local hub cache.
  std::string path;            // Of the new checkpoint.
  AllowedRoots roots;          // Of the source.
  std::optional<DType> dtype;  // Of all floating-point parameters; empty: each as in the source.
  int64_t vocab_multiple = 1;  // The vocabulary is padded with zero rows to a multiple of it.
  CheckpointMeta meta;         // step, config_text and has_optimizer_state are set by the import.
  // The configuration of the model as text, for the checkpoint. May be null.
  std::function<std::string(const GptConfig&)> config_text;
};

// The model that the config.json of a directory (or of org/name) tells of, as ReadModelConfig; there need be no weights.
absl::StatusOr<GptConfig> ReadModelOf(const std::string& directory_or_name, const AllowedRoots& roots);

absl::StatusOr<ConversionPlan> PlanImport(const ImportOptions& options);
absl::StatusOr<SavedCheckpoint> RunImport(const ImportOptions& options, const ConversionObserver& observer);

struct ExportOptions {
  std::string checkpoint;
  std::string manifest_hash;  // Empty: not compared.
  std::string path;           // Of the new directory.
  std::string like;        // Directory of a model or of a checkpoint with the folder hugging_face; empty: the checkpoint itself.
  std::string model_type;  // Family when there is neither; needs `model`.
  AllowedRoots roots;      // Of `like`.
  std::optional<DType> dtype;  // Empty: as in the source, new tensors as in the checkpoint.
  int64_t vocab_size = 0;      // 0: that of the source, else that of the checkpoint.
  int64_t shard_bytes = 5'000'000'000;
  std::optional<GptConfig> model;  // Of the checkpoint's configuration; empty: that of the source's config.json.
};

struct ExportedModel {
  std::string path;
  int64_t bytes = 0;
  int tensors = 0;
  int files = 0;
};

absl::StatusOr<ConversionPlan> PlanExport(const ExportOptions& options);
absl::StatusOr<ExportedModel> RunExport(const ExportOptions& options, const ConversionObserver& observer);

struct VerifyConversionOptions {
  std::string checkpoint;
  std::string manifest_hash;
  std::string source;  // The model that the checkpoint shall equal.
  AllowedRoots roots;
  std::string logits;  // safetensors with input_ids I64 [b, s] and logits F32 [b, s, vocabulary] to compare with; empty: none.
};

struct VerifiedConversion {
  int64_t tensors = 0, bytes = 0;
  std::vector<std::string> different;       // Tensors of the source that do not come back bit for bit.
  std::optional<double> logits_difference;  // Largest, as a share of the largest logit.
};

// Converts each tensor of the checkpoint back and compares it with the source, bit for bit.
absl::StatusOr<VerifiedConversion> VerifyConversion(const VerifyConversionOptions& options, const ConversionObserver& observer);

}  // namespace mbridge
