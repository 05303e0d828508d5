// From the accumulated gradients of an iteration to new parameter values: data-parallel reduction, loss scale, norm, clipping,
// AdamW on fp32 masters; replicated on the data-parallel ranks or sharded over them (ZeRO-1), with equal bits. Tensor-parallel
// ranks update their shards, and parameters that they all have alike.
//
// Order of an iteration (Megatron-LM's MixedPrecisionOptimizer.step): backward fills main_grads, ReduceGradients(), Step().
// Every rank calls the same methods in the same order. Runs on the OpenMP threads of the caller; results do not
// depend on their number. Not thread-safe. Collectives throw EngineError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/core/parameter.h"
#include "engine/optim/adam.h"
#include "engine/optim/loss_scaler.h"

namespace mbridge {

struct OptimizerOptions {
  AdamOptions adam;
  double clip_grad = 1.0;  // optimizer.clip_grad; 0 = no clipping.
  LossScalerOptions loss_scaler;
  bool shard_over_data_parallel = false;  // ddp.use_distributed_optimizer: each rank keeps 1/dp of masters and moments.
  bool count_zero_gradients = false;      // logger.log_num_zeros_in_grad
};

struct StepResult {
  bool updated = false;        // False: a gradient is infinite or NaN; parameters, moments and step count are unchanged.
  float gradient_norm = 0;     // Of all gradients before clipping, loss scale removed.
  int64_t zero_gradients = 0;  // Elements equal to 0; 0 unless counted.
  float loss_scale = 1;        // The one this step used.
};

// A tensor for the checkpoint: `tensor` holds the elements [flat_begin, flat_begin + size) of the parameter's shard.
struct OptimizerStateTensor {
  std::string name;  // "optimizer.state.exp_avg.<parameter>", …exp_avg_sq…, …fp32_param….
  const ParameterSpec* spec = nullptr;
  Tensor tensor;  // F32; the parameter's shape, or 1-D where it is a piece.
  int64_t flat_begin = 0;
  bool write_here = true;  // False where another rank writes the same.
};

class Optimizer {
 public:
  // `store` is allocated and, with the communicators, outlives the optimizer. `tensor_parallel`: null for one rank. Masters are
  // taken from the values that the store holds now.
  // A model in F32 has no separate masters. Throws REASON_OUT_OF_MEMORY.
  Optimizer(ParameterStore* store, const OptimizerOptions& options, Communicator* data_parallel,
            Communicator* tensor_parallel = nullptr);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Masters again from the values: after they were loaded or drawn anew. Moments and the step count are not touched.
  void TakeMastersFromValues();

  // main_grads = sum over data-parallel ranks of main_grads / dp, in rank order, then partial gradients summed over the
  // tensor-parallel ranks; a sharded optimizer gets only its own part right.
  void ReduceGradients();
  // One update with the schedule's rates. Gradients are not changed; the loss scaler is updated. Without a dynamic scaler a step
  // with a non-finite gradient is for the caller to treat as a failure.
  StepResult Step(double lr, double weight_decay);

  // L2 norm over the fp32 masters of the whole model.
  float ParameterNorm();
  // Name of a parameter with a NaN or infinite main gradient on this rank; empty if there is none.
  std::string FindNonFiniteGradient() const;

  const LossScaler& loss_scaler() const { return loss_scaler_; }
  // Adam's step count t and the loss scaler's state: with StateTensors() all that a checkpoint needs.
  int64_t step_count() const { return step_count_; }
  void Restore(int64_t step_count, const LossScaler::State& loss_scaler);
  // Views into the optimizer's memory, to be written or filled. Fixed at construction.
  std::vector<OptimizerStateTensor> StateTensors() const;
  // Bytes of masters and moments on this rank.
  int64_t StateBytes() const;

 private:
  // A part of one parameter that lies in one block of the buffer; norms are summed piece by piece, so that neither threads nor
  // shards change a bit.
  struct Piece {
    int parameter;
    int64_t begin;  // Element offset in the buffers.
    int64_t count;
  };

  void PlanPieces();
  void ReduceOverData();
  void SumPartialGradients();
  // False for a parameter that tensor-parallel rank 0 counts for all.
  bool CountsHere(int parameter) const;
  float* master(int64_t offset) const;
  // sqrt of the sum over the model's parameters of the squared norms of `data * scale` (buffer offsets), each norm rounded to
  // float; NaN or infinite when an element is.
  float Norm(const float* data, int64_t data_origin, float scale);
  template <class T> void UpdateAll(const AdamFactors& decay, const AdamFactors& no_decay);
  void GatherValues();
  int64_t CountZeros() const;

  ParameterStore* store_;
  OptimizerOptions options_;
  Communicator *data_parallel_, *tensor_parallel_;  // The latter null for one rank.
  LossScaler loss_scaler_;
  int64_t step_count_ = 0;
  bool sharded_;
  int64_t shard_length_ = 0;  // Elements a rank owns, a multiple of the block; the last shards may be short or empty.
  int64_t shard_begin_ = 0, shard_end_ = 0;
  std::vector<Piece> pieces_;                // Of the whole buffer, in order.
  size_t first_piece_ = 0, last_piece_ = 0;  // This rank's: [first, last).
  std::vector<double> piece_sums_;
  std::vector<float> staging_;
  std::unique_ptr<float[]> memory_;  // Moments and, unless the model is F32, masters of [shard_begin_, shard_end_).
  float *first_moment_ = nullptr, *second_moment_ = nullptr, *masters_ = nullptr;
};

}  // namespace mbridge
