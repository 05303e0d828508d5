// A checkpoint seen as the tensors of a Hugging Face model.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/conversion.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/source_record.h"
#include "engine/checkpoint/shard_reader.h"

namespace mbridge {

struct OutputTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t bytes() const;
};

// Bytes of a tensor from `offset` on; they stay until the next call.
struct ExportedPiece {
  int64_t offset = 0;
  int64_t bytes = 0;
  const void* data = nullptr;
};

// Holds one parameter in memory. One thread.
class ExportSource {
 public:
  // Finds family and config.json (see ExportOptions) and checks that the checkpoint's tensors are the model's: INVALID_ARGUMENT
  // names the first that is missing, extra or of another shape.
  static absl::StatusOr<std::unique_ptr<ExportSource>> Open(const ExportOptions& options);

  // In the order of the output.
  const std::vector<OutputTensor>& tensors() const { return tensors_; }
  const std::vector<TensorMapping>& mappings() const { return mappings_; }
  const std::vector<std::string>& side_files() const { return record_.side_files; }
  std::string ConfigText() const;
  std::string Fingerprint(int64_t shard_bytes) const;
  ConversionPlan Plan() const;

  // Reads the parameter of a mapping, checksums compared.
  absl::Status Load(const TensorMapping& mapping);
  // What the loaded parameter is of tensor `source` of the mapping.
  absl::StatusOr<ExportedPiece> Piece(const TensorMapping& mapping, int source, const std::string& dtype);

 private:
  ExportSource() = default;
  absl::Status Choose(const ExportOptions& options);
  absl::Status CheckTensors();
  absl::Status PlanTensors(const ExportOptions& options);
  absl::Status WriteConfig(const ExportOptions& options);

  ManifestWithHash manifest_;
  std::map<std::string, const ManifestTensor*> saved_;
  std::unique_ptr<ShardReader> reader_;
  SourceRecord record_;
  const Architecture* architecture_ = nullptr;
  GptConfig config_;
  int64_t vocab_size_ = 0;
  std::vector<TensorMapping> mappings_;
  std::vector<OutputTensor> tensors_;
  std::vector<std::string> notes_;
  Json written_config_;

  const ManifestTensor* loaded_ = nullptr;
  ByteBuffer ours_, theirs_, converted_;
};

}  // namespace mbridge
