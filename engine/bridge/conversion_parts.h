// Steps that the conversions share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/architecture.h"
#include "engine/bridge/conversion.h"
#include "engine/bridge/model_directory.h"
#include "engine/bridge/source_tensor.h"
#include "engine/checkpoint/streamed_checkpoint.h"

namespace mbridge {

// Uninitialised memory that only grows; its pages come from the kernel at first use.
class ByteBuffer {
 public:
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY).
  absl::Status Resize(int64_t bytes);
  char* data() const { return memory_.get(); }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t capacity_ = 0;
};

// A directory's model, with a place for every parameter.
struct ImportedModel {
  const Architecture* architecture = nullptr;
  GptConfig config;                            // With the padded vocabulary.
  int64_t vocab_size = 0;                      // Theirs.
  std::vector<TensorMapping> mappings;         // By parameter.
  std::map<std::string, std::string> aliases;  // Stored tensors that repeat another (a tied head) to that one.
  std::vector<std::string> skipped;
};

// Reads config.json and checks that every tensor is there with its shape. UNSUPPORTED_MODEL or NOT_FOUND (INVALID_REQUEST)
// name all tensors that are missing, misshapen, or there although config.json denies them.
absl::StatusOr<ImportedModel> OpenModel(const ModelDirectory& directory, int64_t vocab_multiple);

// The type that the parameter gets: `wanted`, else what holds all its sources.
absl::StatusOr<DType> TypeOf(const ModelDirectory& directory, const TensorMapping& mapping, std::optional<DType> wanted);

// The parameter's whole value. Padding rows are zero.
absl::Status ReadMapped(const ModelDirectory& directory, const TensorMapping& mapping, DType dtype, void* ours);

// The stretch [begin, end) of tensor `source` that the mapping touches, in elements.
struct Extent {
  int64_t begin = 0, end = 0;
};
Extent ExtentOf(const TensorMapping& mapping, int source);
// The mapping's copies of one source, with that source's elements counted from extent.begin.
TensorMapping OnlySource(const TensorMapping& mapping, int source, int64_t extent_begin);

// CANCELLED when the observer wants to stop.
absl::Status CheckStop(const ConversionObserver& observer);

// The checkpoint that an import writes.
struct ImportTarget {
  std::string path;
  std::string fingerprint;  // As StreamedCheckpoint::Options.
  CheckpointMeta meta;      // step and has_optimizer_state are set here.
  std::vector<StreamedCheckpoint::Entry> entries;
  std::function<absl::Status(int index, void* into)> read;              // The bytes of an entry.
  std::function<absl::Status(const std::string& directory)> add_files;  // Beside the data, before the commit.
};

// Writes and commits it, tensor by tensor; goes on with what an earlier call with the same fingerprint has written.
absl::StatusOr<SavedCheckpoint> WriteImport(const ImportTarget& target, const ConversionObserver& observer);

}  // namespace mbridge
