// GPT: forward, backward and evaluation of one pipeline stage that holds the whole model (megatron/core/models/gpt/gpt_model.py),
// or with tensor parallelism a share of every layer.
//
// Order of calls: DeclareParameters, ParameterStore::Allocate, InitializeWeights or loading of values, Prepare, OnWeightsChanged
// whenever values changed (Prepare does it once), then ForwardBackward and Evaluate. Nothing is allocated after Prepare. One
// thread calls a model, on every tensor-parallel rank with the same batch; OpenMP threads work inside. Same inputs, thread count
// and instruction set: same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/core/op.h"
#include "engine/core/torch_random.h"
#include "engine/model/gpt_config.h"
#include "engine/model/microbatch_inputs.h"

namespace mbridge {

class Communicator;
class ParameterStore;
class PassObserver;

class GptModel {
 public:
  // Throws EngineError REASON_INVALID_CONFIG or REASON_UNSUPPORTED_MODEL for a config that cannot be built. `tensor_parallel`
  // (null means one rank) must outlive the model. `context`: where it runs; its stream and workspace outlive the model.
  GptModel(const GptConfig& config, Communicator* tensor_parallel, const Context& context = {});
  ~GptModel();
  GptModel(const GptModel&) = delete;
  GptModel& operator=(const GptModel&) = delete;

  // Adds every parameter with Megatron-Core's name, in Megatron-LM's order of creation.
  void DeclareParameters(ParameterStore* store);

  // Megatron-LM's initial values: fp32 draws, rounded to the model dtype; each rank draws its shards from its own model-parallel
  // stream. Advances the model-parallel and the CPU stream.
  void InitializeWeights(ParameterStore* store, RngStreams* streams);

  // Allocates every workspace. `store` must outlive the model's further use. May be called again with another batch size.
  void Prepare(const ParameterStore& store, int micro_batch_size);

  // Refreshes copies of the weights; call after an optimizer step or a load. With an observer some are refreshed where forward
  // needs them.
  void OnWeightsChanged();

  // `observer` is told of every pass, but for what a CUDA graph replays: there it hears of the whole forward before. Null:
  // nobody; else it outlives the model's further use.
  void Observe(PassObserver* observer);

  struct LossSum {
    double loss_sum = 0;  // Sum of loss * mask over the microbatch.
    double tokens = 0;    // Sum of the mask.
  };

  // One training microbatch. Token ids must lie in the padded vocabulary and position ids in the position table (else
  // REASON_DATA_ERROR). Adds to every main_grad the gradient of grad_scale * loss_sum / max(tokens, 1): grad_scale is 1 / number
  // of microbatches, times the loss scale. Draws dropout masks from `streams` in Megatron-LM's order. The losses join those that
  // TakeLossSum returns. On a GPU the work is enqueued; the arrays may change when the call returns.
  void AddForwardBackward(const HostMicrobatch& batch, float grad_scale, RngStreams* streams);
  // The same of several microbatches, one after another.
  void AddForwardBackwards(std::span<const HostMicrobatch> batches, float grad_scale, RngStreams* streams);

  // Of what a GPU replays a CUDA graph: nothing, each microbatch, all those of a call together.
  enum class Graphs : uint8_t { kNone, kMicrobatch, kCall };
  // After Prepare. Graphs are recorded after `warm_up` calls of the two functions above, and again whenever grad_scale changes;
  // the bits stay the same. `microbatches`: the most in a call. No effect on a CPU and with 4-bit
  // layers.
  void UseGraphs(Graphs graphs, int microbatches, int64_t warm_up);
  // Kernels, copies and fills of the graph that is replayed now; 0 while there is none.
  int64_t RecordedNodes() const;
  // The loss of a microbatch without dropout and gradients joins the others; draws nothing.
  void AddEvaluation(const HostMicrobatch& batch);
  // The sums over all microbatches since the last call; waits for the GPU.
  LossSum TakeLossSum();
  // The same in stream order into `sums`, F64 [2] on the model's device, without waiting.
  void MoveLossSum(const Tensor& sums);

  // AddForwardBackward and AddEvaluation of one microbatch with its own sum.
  LossSum ForwardBackward(const int32_t* tokens, const int32_t* labels, const float* loss_mask, const int32_t* position_ids,
                          float grad_scale, RngStreams* streams);

  // Moves the expert biases (moe_router_enable_expert_bias) towards equal load, by the tokens of all ranks since the last call.
  // Once an iteration, on every rank.
  void UpdateExpertBiases(Communicator* data_parallel);

  // Delayed scaling's next scales, from the largest values since the last call over all `ranks` (null: of this one). At the end
  // of each iteration, on every rank.
  void UpdateScales(Communicator* ranks);
  // Whether the low-precision linear layers multiply 8-bit operands; otherwise that is emulated. After Prepare.
  bool HasNarrowProducts() const;
  // What a run must find again besides weights, by name; the same on every rank. Call OnStateRestored after it was loaded.
  std::vector<std::pair<std::string, Tensor>> StateTensors() const;
  void OnStateRestored();

  LossSum Evaluate(const int32_t* tokens, const int32_t* labels, const float* loss_mask, const int32_t* position_ids);

  // logits [s, b, padded vocabulary / ranks] F32 of one microbatch without dropout, rounded to the model dtype: of this rank's
  // words.
  void Logits(const int32_t* tokens, const int32_t* position_ids, const Tensor& logits);

  const GptConfig& config() const;  // Of the whole model.
  // Bytes allocated by Prepare: activations, workspaces and weight copies.
  int64_t ActivationBytes() const;
  struct MemoryPlan {
    int64_t activations = 0;    // From forward to backward.
    int64_t scratch = 0;        // Workspaces.
    int64_t weight_copies = 0;  // In the type of the products, on a CPU.
  };
  // The same bytes, but for a few of alignment, without allocating: of parameters that DeclareParameters has put into the store.
  MemoryPlan PlanMemory(const ParameterStore& store, int micro_batch_size) const;
  // Model FLOPs of a training step per token, 3 times the forward pass (Megatron-LM's num_floating_point_operations).
  double FlopsPerToken() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mbridge
