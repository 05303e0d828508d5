// Sharded checkpoints that any parallel layout can save and any other load.
//
// A checkpoint is a folder: `rank_00000.safetensors` … (one a rank that holds something to write, in the layout of
// safetensors) and `manifest.json` (step, configuration, training state, and for each tensor its global shape and where its
// shards lie, with their XXH3-64). It is built as the sibling `.tmp-<name>` and gets its name by rename once every byte is on
// the disk, so a folder without that prefix is whole. Numbers are little-endian.
//
// All tensors and the communicator work on host memory. Functions are blocking and keep no state; one thread at a time per
// folder. A broken communicator throws EngineError (PEER_LOST, COLLECTIVE_TIMEOUT); everything else comes as a status with a
// reason: DISK_FULL, CHECKPOINT_IO_ERROR, CHECKPOINT_CORRUPT, CHECKPOINT_NOT_FOUND, NAN_LOSS, INVALID_CONFIG. With several
// ranks each of them returns an error when one has one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "engine/core/parameter.h"
#include "engine/core/tensor.h"

namespace mbridge {

// Names of optimizer state begin so; a weights-only load leaves these tensors alone.
inline constexpr std::string_view kOptimizerStatePrefix = "optimizer.";

// A tensor of this rank, as a part of the whole (a rank may have several parts of one tensor): the block [shard_begin,
// shard_begin + shape[shard_axis]) along shard_axis
// (-1: the whole tensor) and of that block, in row-major order, the elements [flat_begin, flat_begin + tensor.size()).
struct CheckpointTensor {
  std::string name;
  Shape global_shape;
  Shape shard_shape;  // Of the block; the tensor's own shape unless it is a flat piece of it.
  int shard_axis = -1;
  int64_t shard_begin = 0;
  int64_t flat_begin = 0;  // Not 0 only for pieces (distributed optimizer).
  Tensor tensor;
  bool write_here = true;  // False: another rank writes the same piece (data-parallel replicas). Loading ignores it.
};

// Adds `tensor`, laid out as the elements [flat_begin, flat_begin + size) of the parameter's shard, under `name`: one entry, or
// one for each stripe of the shard that it touches.
void AppendCheckpointTensors(const std::string& name, const ParameterSpec& spec, const Tensor& tensor, int64_t flat_begin,
                             bool write_here, std::vector<CheckpointTensor>* tensors);

struct CheckpointMeta {
  int64_t step = 0;
  int64_t consumed_samples = 0;
  std::string run_name;
  std::string job_id;
  std::string build_id;
  int attempt = 1;
  std::string config_text;        // The resolved configuration, as it is.
  std::string state_json = "{}";  // A JSON object: random streams, schedule, loss scaler, data iterators.
  bool has_optimizer_state = true;
};

struct SavedCheckpoint {
  std::string path;
  int64_t bytes = 0;  // Of all files.
  int tensors = 0;
  std::string manifest_hash;  // XXH3-64 of manifest.json, 16 hexadecimal digits.
};

// Writes `final_path` (its parent is made; the folder must not exist yet). The meta of rank 0 counts. When it returns OK the
// checkpoint is durable; on an error nothing is left of it and older checkpoints are untouched. Removes what earlier saves that
// died left in the parent folder. Values must be finite (NAN_LOSS names the tensor); every element must be written by exactly
// one rank (ENGINE_ERROR).
absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& final_path, const CheckpointMeta& meta,
                                               const std::vector<CheckpointTensor>& tensors, Communicator* world);

struct LoadOptions {
  std::string expected_manifest_hash;  // Empty: not compared.
  bool weights_only = false;           // Skips optimizer state; floating-point values are converted to the target's type.
};

// Fills `into` and returns what was saved with it. Each shard that is read is checked as a whole. After an error the tensors'
// contents are unspecified. INVALID_CONFIG names a tensor that the checkpoint lacks, that has another shape or type, or that
// no rank asked for. The state of the optimizer must be there unless weights_only.
absl::StatusOr<CheckpointMeta> LoadCheckpoint(const std::string& path, const LoadOptions& options,
                                              const std::vector<CheckpointTensor>& into, Communicator* world);

// Meta only: one small file is read and checked.
absl::StatusOr<CheckpointMeta> ReadCheckpointMeta(const std::string& path, const std::string& expected_manifest_hash = "");

struct VerifyResult {
  int64_t bytes = 0;
  int tensors = 0;
  std::string manifest_hash;
};

// Reads every byte. DATA_LOSS (CHECKPOINT_CORRUPT) names the damaged file and tensor.
absl::StatusOr<VerifyResult> VerifyCheckpoint(const std::string& path, const std::string& expected_manifest_hash = "");

// Removes the temporary folders of saves that died. Only when nobody saves there.
absl::Status RemoveUnfinishedCheckpoints(const std::string& parent_directory);

}  // namespace mbridge
