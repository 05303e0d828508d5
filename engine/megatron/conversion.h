// Conversion between checkpoints of Megatron-LM and ours, tensor by tensor: memory for a few tensors, whatever the size of the
// model. Read are the layouts torch_dist and torch (one file a rank) of GPT models, whatever their parallel sizes; written is
// torch_dist. No pickle is executed. Atomic and resumable as engine/bridge/conversion.h.
//
// Weights only: the state of the optimizer, random streams and position in the data are not taken, and the plan says so.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/bridge/conversion.h"

namespace mbridge {

// Whether the directory has the files of a Megatron-LM checkpoint.
bool LooksLikeMegatron(const std::string& directory);

struct MegatronImportOptions {
  std::string source;  // DIR with latest_checkpointed_iteration.txt, or one of its iter_ folders.
  std::string path;    // Of the new checkpoint.
  AllowedRoots roots;  // Of source and like.
  // Hugging Face model whose config.json says what the model is, in place of the run's arguments; its tokenizer comes along, so
  // that the checkpoint can be exported to Hugging Face. Empty: none.
  std::string like;
  std::optional<DType> dtype;                                // Of all floating-point parameters; empty: each as in the source.
  CheckpointMeta meta;                                       // step, config_text and has_optimizer_state are set by the import.
  std::function<std::string(const GptConfig&)> config_text;  // As ImportOptions. May be null.
};

absl::StatusOr<ConversionPlan> PlanMegatronImport(const MegatronImportOptions& options);
absl::StatusOr<SavedCheckpoint> RunMegatronImport(const MegatronImportOptions& options, const ConversionObserver& observer);

struct MegatronExportOptions {
  std::string checkpoint;
  std::string manifest_hash;       // Empty: not compared.
  std::string path;                // Of the new directory, which gets latest_checkpointed_iteration.txt and one iter_ folder.
  std::optional<GptConfig> model;  // Of the checkpoint's configuration; empty: that of the model that it was imported from.
  std::optional<DType> dtype;      // Of all floating-point tensors; empty: as in the checkpoint.
};

absl::StatusOr<ConversionPlan> PlanMegatronExport(const MegatronExportOptions& options);
absl::StatusOr<ExportedModel> RunMegatronExport(const MegatronExportOptions& options, const ConversionObserver& observer);

struct MegatronVerifyOptions {
  std::string checkpoint;
  std::string manifest_hash;
  std::string source;  // The Megatron-LM checkpoint that it shall equal.
  std::string like;    // As for the import.
  AllowedRoots roots;
  std::string logits;  // As VerifyConversionOptions, with all rows of the padded vocabulary; empty: none.
};

// Compares each tensor of the checkpoint with the source, bit for bit.
absl::StatusOr<VerifiedConversion> VerifyMegatronConversion(const MegatronVerifyOptions& options,
                                                            const ConversionObserver& observer);

}  // namespace mbridge
