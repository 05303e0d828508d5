// A resolved configuration as the plain numbers that the engine works with.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/comm/process_groups.h"
#include "engine/core/tensor.h"
#include "engine/data/gpt_data.h"
#include "engine/model/gpt_config.h"
#include "engine/model/gpt_model.h"
#include "engine/optim/adam.h"
#include "engine/optim/loss_scaler.h"
#include "engine/optim/schedule.h"
#include "mbridge/v1/recipe.pb.h"

namespace mbridge {

struct TrainingPlan {
  DeviceType device = DeviceType::kCpu;  // Set by the rank program: the configuration does not choose it.
  GptConfig model;
  GptDataConfig data;
  ScheduleOptions schedule;
  AdamOptions adam;
  LossScalerOptions loss_scaler;
  bool distributed_optimizer = false;
  int64_t bucket_elements = 0;       // ddp.bucket_size; 0: Megatron-LM's rule.
  bool overlap_grad_reduce = false;  // Neither with CUDA graphs: a hook is no part of a graph.
  bool overlap_param_gather = false;
  DType moment_dtype = DType::kF32;  // F32 or BF16.
  bool split_masters = false;        // BF16 values and 16-bit remainders make the masters.
  double clip_grad = 1.0;            // 0: no clipping.
  bool check_nan_in_loss = true;     // A NaN loss ends the job.
  bool check_nan_in_grad = true;

  int64_t train_iters = 0;
  int64_t global_batch_size = 0;
  int64_t micro_batch_size = 0;
  int64_t microbatches = 0;          // A rank and iteration: global batch / (micro batch * data-parallel size).
  int64_t eval_interval = 0;         // 0: no evaluation inside training.
  int64_t eval_iters = 0;            // 0: no evaluation at all.
  int64_t exit_interval = 0;         // 0: none. End after an iteration that it divides.
  double exit_duration_minutes = 0;  // 0: none.

  int64_t log_interval = 1;
  bool log_params_norm = false;
  bool log_num_zeros = false;

  bool save = true;
  int64_t save_interval = 0;  // 0: only at the end.
  bool save_optimizer = true;
  bool save_rng = true;

  GptModel::Graphs graphs = GptModel::Graphs::kNone;  // On a GPU.
  int64_t graph_warm_up = 3;                          // Iterations before they are recorded.

  uint64_t seed = 1234;
  ParallelSizes parallel;
  double flops_per_token = 0;
  double collective_timeout_seconds = 600;

  int64_t tokens_per_iteration() const { return global_batch_size * model.seq_length; }
};

// Reads what resolving has validated; INVALID_ARGUMENT names a key that is missing or that this engine cannot do.
absl::StatusOr<TrainingPlan> MakeTrainingPlan(const v1::ResolvedConfig& resolved);

// The model alone.
absl::StatusOr<GptConfig> ModelOf(const v1::ConfigContainer& config);

}  // namespace mbridge
