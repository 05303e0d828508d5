// From the accumulated gradients of an iteration to new parameter values: data-parallel reduction, loss scale, norm, clipping,
// AdamW on fp32 masters; replicated on the data-parallel ranks or sharded over them (ZeRO-1), with equal bits. Tensor-parallel
// ranks update their shards, and parameters that they all have alike.
//
// Order of an iteration (Megatron-LM's MixedPrecisionOptimizer.step): backward fills main_grads, ReduceGradients(),
// MeasureGradients(), Step(). With overlap (BucketOptions) exchange() observes the model, and is told before the last
// microbatch's backward. Every rank calls the same methods in the same order. Runs on the context's device, where the parameters
// are: on the CPU on the OpenMP threads of the caller (results do not depend on their number), on CUDA in the order of the
// context's stream, which is waited for where a method returns a number. Not thread-safe. Collectives throw EngineError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/core/device.h"
#include "engine/core/parameter.h"
#include "engine/optim/adam.h"
#include "engine/optim/bucket_exchange.h"
#include "engine/optim/loss_scaler.h"
#include "engine/optim/update_ops.h"

namespace mbridge {

struct OptimizerOptions {
  AdamOptions adam;
  double clip_grad = 1.0;  // optimizer.clip_grad; 0 = no clipping.
  LossScalerOptions loss_scaler;
  bool shard_over_data_parallel = false;  // ddp.use_distributed_optimizer: each rank keeps 1/dp of masters and moments.
  bool count_zero_gradients = false;      // logger.log_num_zeros_in_grad
  DType moment_dtype = DType::kF32;  // Or BF16: optimizer.exp_avg_dtype and exp_avg_sq_dtype of the precision-aware optimizer.
  BucketOptions buckets;
  bool split_masters = false;  // optimizer.store_param_remainders: a BF16 model's masters as values and remainders.
};

struct MeasuredGradients {
  float norm = 0;     // Of all gradients before clipping, loss scale removed; NaN or infinite where one is.
  int64_t zeros = 0;  // Elements equal to 0; 0 unless counted.
};

struct StepResult {
  bool updated = false;        // False: a gradient is infinite or NaN; parameters, moments and step count are unchanged.
  float gradient_norm = 0;     // Of all gradients before clipping, loss scale removed.
  int64_t zero_gradients = 0;  // Elements equal to 0; 0 unless counted.
  float loss_scale = 1;        // The one this step used.
};

// A tensor for the checkpoint: `tensor` holds the elements [flat_begin, flat_begin + size) of the parameter's shard. A parameter
// may have several.
struct OptimizerStateTensor {
  std::string name;  // "optimizer.state.exp_avg.<parameter>", …exp_avg_sq…, …fp32_param…, …fp32_param_remainder….
  const ParameterSpec* spec = nullptr;
  Tensor tensor;  // On the optimizer's device; the parameter's shape, or 1-D where it is a piece.
  int64_t flat_begin = 0;
  bool write_here = true;  // False where another rank writes the same.
};

class Optimizer {
 public:
  // `store` is allocated and, with the communicators, outlives the optimizer. `tensor_parallel`: null for one rank. Masters are
  // taken from the values that the store holds now.
  // A model in F32 has no separate masters. `context` is on the store's device. Throws REASON_OUT_OF_MEMORY.
  Optimizer(ParameterStore* store, const OptimizerOptions& options, Communicator* data_parallel,
            Communicator* tensor_parallel = nullptr, const Context& context = {});
  // What a store on CUDA must allocate beyond its parameters, so that a sharded optimizer can exchange equal parts in place.
  static int64_t SpareElements(int data_parallel_ranks);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Masters again from the values: after they were loaded or drawn anew. Moments and the step count are not touched.
  void TakeMastersFromValues();

  // main_grads = sum over data-parallel ranks of main_grads / dp, in rank order, then partial gradients summed over the
  // tensor-parallel ranks; a sharded optimizer gets only its own part right.
  void ReduceGradients();
  // The traffic between data-parallel ranks. Before values are read otherwise than by a model that it observes: FinishGather().
  BucketExchange& exchange() { return exchange_; }
  // Of the reduced gradients. Waits for the context's stream: what was enqueued before is done too.
  MeasuredGradients MeasureGradients();
  // One update with the schedule's rates. Gradients are not changed; the loss scaler is updated. Without a dynamic scaler a step
  // with a non-finite gradient is for the caller to treat as a failure.
  StepResult Step(const MeasuredGradients& gradients, double lr, double weight_decay);
  StepResult Step(double lr, double weight_decay) { return Step(MeasureGradients(), lr, weight_decay); }

  // L2 norm over the fp32 masters of the whole model (over the values where masters are split).
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
  // The same of the fullest of `shards` ranks (1: not sharded), for `elements` of ParameterStore::PlannedElements.
  static int64_t PlannedStateBytes(int64_t elements, DType dtype, const OptimizerOptions& options, int shards);

 private:
  // A stretch of the buffers that this rank updates; its pieces are [first, last).
  struct Shard {
    int64_t begin = 0, end = 0;
    int64_t state = 0;  // Where its elements begin in masters and moments.
    size_t first_piece = 0, last_piece = 0;
    int64_t size() const { return end - begin; }
    int64_t pieces() const { return static_cast<int64_t>(last_piece - first_piece); }
  };

  void PlanPieces();
  void AllocateMemory();
  void SumPartialGradients();
  // apply(piece, elements before it) for the pieces on this rank whose gradient is a part; the number of elements.
  template <class Apply> int64_t ForEachPartialPiece(Apply&& apply) const;
  int tensor_rank() const { return tensor_parallel_ == nullptr ? 0 : tensor_parallel_->rank(); }
  int tensor_ranks() const { return tensor_parallel_ == nullptr ? 1 : tensor_parallel_->size(); }
  // False for a parameter that tensor-parallel rank 0 counts for all.
  bool CountsOn(int tensor_rank, int parameter) const;
  // Squared norms of `data * scale` by parameter, in host_sums_ once the stream was waited for. Data: the whole buffer, of which
  // the ranks' pieces are summed; all of this rank's buffer, whatever it owns, with this rank's sums alone; the state of the
  // shards.
  enum class Extent : uint8_t { kOwned, kAll, kState };
  void SumParameters(const Tensor& data, Extent extent, float scale) const;
  // sqrt of the sum over the model's parameters of the squared norms in host_sums_, each norm rounded to float, in the order of
  // the tensor-parallel ranks; NaN or infinite when an element is.
  float NormOfSums() const;
  void Update(const Shard& shard, const AdamFactors& decay, const AdamFactors& no_decay);
  PieceList PiecesOf(const Shard& shard) const { return {all_pieces_.pieces + shard.first_piece, shard.pieces()}; }
  // The shard's elements of masters or moments.
  static Tensor StateOf(const Tensor& state, const Shard& shard) {
    return state.empty() ? state : state.Rows(shard.state, shard.size());
  }
  // In host_zeros_ once the stream was waited for.
  void CountZeroGradients() const;
  Tensor View(void* data, DType dtype, int64_t count) const { return {data, dtype, context_.device, {count}}; }

  ParameterStore* store_;
  OptimizerOptions options_;
  Communicator *data_parallel_, *tensor_parallel_;  // The latter null for one rank.
  Context context_;
  Device& device_;
  LossScaler loss_scaler_;
  int64_t step_count_ = 0;
  bool sharded_;
  BucketExchange exchange_;
  std::vector<Shard> shards_;  // One a bucket where sharded, else one.
  // Pieces lie in one block of the buffer each.
  std::vector<UpdatePiece> pieces_;            // Of the whole buffer, in order.
  std::vector<int> piece_parameters_;          // Which parameter a piece belongs to.
  std::vector<int> parameters_;                // Those that have pieces, in order.
  PieceList all_pieces_, counted_pieces_;      // On the device; the latter those of this rank that it counts.
  std::vector<std::shared_ptr<void>> memory_;  // On the device, and page-locked.
  // Of the shards, one after another. No masters if the model is F32; remainders instead where they are split.
  Tensor first_moment_, second_moment_, masters_, remainders_;
  Tensor piece_sums_, piece_firsts_, zeros_, staging_;
  Tensor parameter_sums_;        // Of each tensor-parallel rank.
  double* host_sums_ = nullptr;  // A copy of parameter_sums_.
  int64_t* host_zeros_ = nullptr;
};

}  // namespace mbridge
