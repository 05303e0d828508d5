// Everything that a training run carries from one iteration to the next, and its way into and out of a checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"
#include "engine/optim/optimizer.h"
#include "engine/train/interval.h"
#include "engine/train/parallel_groups.h"
#include "engine/train/training_plan.h"

namespace mbridge {

// Who trains, and where its checkpoints lie.
struct RunIdentity {
  std::string job_id;
  std::string run_name;
  std::string build_id;
  int attempt = 1;
  std::string checkpoint_directory;  // Empty: nothing is saved.
  std::string load_checkpoint_path;  // Empty: initial weights from the seed.
  bool load_weights_only = false;
  std::string expected_manifest_hash;
  std::string config_text;
  std::string config_hash;
};

OptimizerOptions OptimizerOptionsOf(const TrainingPlan& plan);

// Not thread-safe. `plan` and `groups` outlive it.
class TrainState {
 public:
  // Allocates everything on the context's device. Throws REASON_OUT_OF_MEMORY.
  TrainState(const TrainingPlan& plan, const Context& context, const ParallelGroups& groups);

  // Initial weights from the seed, as Megatron-LM draws them.
  void InitializeFresh();
  // Continues exactly where the checkpoint was written; weights_only takes only the weights and starts at step 0.
  absl::Status Load(const RunIdentity& identity);
  // Every rank calls it. The directory is durable when it returns.
  absl::StatusOr<SavedCheckpoint> Save(const RunIdentity& identity);

  GptModel& model() { return *model_; }
  ParameterStore& parameters() { return *parameters_; }
  Optimizer& optimizer() { return *optimizer_; }
  RngStreams& rng() { return rng_; }

  int64_t step = 0;  // Iterations finished.
  int64_t consumed_train_samples = 0;
  int64_t consumed_valid_samples = 0;
  int64_t scheduled_samples = 0;  // Position of the schedules; skipped steps do not advance it.
  bool evaluation_due = false;    // The run was stopped before the evaluation of `step`.
  IntervalSums interval;          // What the next log line averages, so that a resumed run prints the same line.

 private:
  std::vector<CheckpointTensor> Tensors(bool with_optimizer) const;
  std::string StateJson() const;
  absl::Status RestoreState(const CheckpointMeta& meta);

  const TrainingPlan& plan_;
  const Context context_;
  const ParallelGroups& groups_;
  std::unique_ptr<ParameterStore> parameters_;
  std::unique_ptr<GptModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  RngStreams rng_;
};

}  // namespace mbridge
