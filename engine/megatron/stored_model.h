// The tensors of a Megatron-LM checkpoint, whichever of its layouts it has, as values of our parameters.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/conversion_parts.h"
#include "engine/bridge/model_directory.h"
#include "engine/core/file.h"
#include "engine/core/tensor.h"
#include "engine/megatron/parameter_names.h"
#include "engine/megatron/torch_archive.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Names the newest iteration, in the folder above the iter_ folders.
inline constexpr const char* kTrackerName = "latest_checkpointed_iteration.txt";

// Files of a checkpoint; a few are open at a time.
class CheckpointFiles {
 public:
  explicit CheckpointFiles(std::string directory) : directory_(std::move(directory)) {}
  // `name` beneath the directory, which the caller has checked. The reader stays until the next call.
  absl::StatusOr<const FileReader*> Open(const std::string& name);
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  std::map<std::string, std::unique_ptr<FileReader>> open_;
};

// A block of a stored tensor that lies in one file.
struct StoredPiece {
  std::vector<int64_t> begin, size;  // Of the block.
  std::string file;
  int64_t offset = 0, bytes = 0;     // Of the archive of torch.save that holds it.
  std::optional<TorchTensor> place;  // Where that is known already.
};

struct StoredTensor {
  std::string type;            // torch's name: "BFloat16".
  std::optional<DType> dtype;  // None: a type that no parameter has.
  std::vector<int64_t> shape;  // Of the whole; of one shard where split.
  bool split = false;          // pieces: shards of the tensor-parallel ranks, in their order, or copies.
  std::vector<StoredPiece> pieces;
  int64_t bytes() const;
};

// A block of a parameter: [at, at + size) is the block of the same size at `from` of the piece.
struct SourceBlock {
  const StoredPiece* piece = nullptr;
  std::vector<int64_t> at, size;  // In the parameter, with its rank.
  std::vector<int64_t> from;      // In the piece, with its rank: leading axes first.
};

// Where a parameter's elements are; the blocks hold each once.
struct ParameterSource {
  std::vector<std::string> keys;
  DType dtype = DType::kF32;
  std::vector<SourceBlock> blocks;
};

struct StoredModel {
  std::string path;       // Of the folder with the files.
  std::string format;     // "torch_dist" or "torch".
  std::string iteration;  // "100" or "release".
  std::map<std::string, StoredTensor> tensors;
  // Beside the model's tensors, and not read: of the optimizer; random states and the like.
  int64_t optimizer_tensors = 0, optimizer_bytes = 0, other_objects = 0;
  std::vector<std::string> notes;
  Pickle common;                           // Keeps `arguments` alive.
  const PickleValue* arguments = nullptr;  // Of the run: the dict of argparse's Namespace; null when there are none.
  std::shared_ptr<CheckpointFiles> files;

  // NOT_FOUND when there is no such tensor; INVALID_ARGUMENT when its shape or type is another.
  absl::StatusOr<ParameterSource> Find(const std::string& ours, const Shape& shape, const GptConfig& config) const;
  // The parameter's whole value as `dtype`.
  absl::Status Read(const ParameterSource& source, const Shape& shape, DType dtype, void* into) const;
};

// DIR with latest_checkpointed_iteration.txt, or one of its iter_… folders. NOT_FOUND (CHECKPOINT_NOT_FOUND), DATA_LOSS, or
// INVALID_ARGUMENT (UNSUPPORTED_MODEL) naming what is refused.
absl::StatusOr<StoredModel> OpenStoredModel(const std::string& directory, const AllowedRoots& roots);

// The two layouts; `model` has path and files.
absl::Status ReadTorchDist(StoredModel* model);
absl::Status ReadRankFiles(const AllowedRoots& roots, StoredModel* model);

// The run's arguments in what torch.save holds: the dict itself or the state of `args`.
const PickleValue* ArgumentsOf(const PickleValue& common);
// Of a dict of argparse's names: whole number, or `missing`.
int64_t IntArgument(const PickleValue& arguments, std::string_view name, int64_t missing);

absl::Status BrokenCheckpoint(const std::string& path, std::string_view what);       // DATA_LOSS (CHECKPOINT_CORRUPT)
absl::Status UnsupportedCheckpoint(const std::string& path, std::string_view what);  // INVALID_ARGUMENT (UNSUPPORTED_MODEL)

}  // namespace mbridge
