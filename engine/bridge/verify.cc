// A checkpoint against the model that it was imported from.
#include <cstring>

#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/exported_tensors.h"
#include "engine/bridge/logits_comparison.h"

namespace mbridge {
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
  GptConfig config = model.config;
  for (const TensorMapping& mapping : exported->mappings()) {
    if (mapping.ours == "embedding.word_embeddings.weight") config.padded_vocab_size = mapping.shape[0];
  }
  MB_ASSIGN_OR_RETURN(verified.logits_difference,
                      CompareLogits(options.logits, options.checkpoint, options.manifest_hash, config, model.vocab_size));
  return verified;
}

}  // namespace mbridge
