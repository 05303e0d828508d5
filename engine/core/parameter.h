// Parameters of a rank: contiguous buffers for values (model dtype) and main gradients (fp32), Megatron-Core names and shapes.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/op.h"

namespace mbridge {

// How a parameter is laid out over tensor-parallel ranks, drawn and decayed.
struct ParameterSpec {
  std::string name;         // Megatron-Core's: "decoder.layers.0.self_attention.linear_qkv.weight".
  Shape shape;              // Of this rank's shard.
  Shape global_shape;       // Of the whole tensor.
  int shard_axis = -1;      // Axis split over the tensor-parallel group; -1 = replicated.
  int64_t shard_begin = 0;  // First global index of this rank along shard_axis, in the first stripe.
  // Stripes of shard_axis, each split over the ranks: gate and linear half of fc1, the parts of Mamba's in_proj. Empty: one.
  std::vector<int64_t> stripes = {};  // Their indices of this rank; together shape[shard_axis].
  bool trainable = true;              // False: state beside the weights (a router's expert bias): F32, no gradient, no optimizer.
  bool weight_decay = true;           // False: 1-D tensors and biases (Megatron-LM's no-decay group).
  bool partial_gradient = false;      // Each tensor-parallel rank has a part of its gradient: they are summed.
};

struct Parameter {
  ParameterSpec spec;
  Tensor value;      // Model dtype (BF16, F16 or F32), inside the value buffer; F32 and outside if it is not trainable.
  Tensor main_grad;  // F32, inside the gradient buffer; zeroed once an iteration, accumulated over microbatches. Empty if the
                     // parameter is not trainable.
};

// Owns the two buffers. The order of parameters is the order of creation (= Megatron-LM's draws), which is also the buffer
// order; every parameter begins at a multiple of 64 bytes. Not thread-safe.
class ParameterStore {
 public:
  ParameterStore(DType dtype, DeviceType device) : dtype_(dtype), device_(device) {}

  // Declares a parameter; its index. All declarations come before Allocate.
  int Add(ParameterSpec spec);
  // Allocates both buffers, zero-filled, with room for `spare` elements after the parameters. Throws REASON_OUT_OF_MEMORY.
  void Allocate(int64_t spare = 0);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Parameter& operator[](int index) const { return parameters_[index]; }
  // Index by name, -1 if unknown.
  int Find(std::string_view name) const;
  Tensor values() const { return values_; }       // 1-D, model dtype, with the alignment gaps (always zero).
  Tensor main_grads() const { return grads_; }    // 1-D, F32, same element offsets as values().
  int64_t capacity() const { return capacity_; }  // Elements that each buffer has memory for.
  int64_t PlannedElements() const;                // That values() has, or will have.
  int64_t NumElements() const;                    // Of the trainable ones, without gaps.
  int64_t NumGlobalElements() const;              // The same of the whole tensors that this rank has shards of.
  DType dtype() const { return dtype_; }
  DeviceType device() const { return device_; }
  // In the order of the context's stream.
  void ZeroGradients(const Context& context = {});

 private:
  DType dtype_;
  DeviceType device_;
  std::vector<Parameter> parameters_;
  Tensor values_, grads_;
  int64_t capacity_ = 0;
  std::shared_ptr<void> value_memory_, grad_memory_, state_memory_;
};

}  // namespace mbridge
