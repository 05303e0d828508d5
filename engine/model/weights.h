// The weights of a model as its products want them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/core/arena.h"
#include "engine/core/parameter.h"
#include "engine/core/torch_random.h"

namespace mbridge {

// How a parameter gets its first value.
struct InitRule {
  enum class Kind : uint8_t {
    kConstant,             // `value` everywhere.
    kModelParallelNormal,  // Normal of deviation `value`, drawn on the device from the model-parallel stream.
    kReplicatedNormal,     // The same from the default stream, in which tensor-parallel ranks agree.
    kExpertNormal,         // The same from the expert-parallel stream.
    kCpuNormal,            // Normal of deviation `value`, drawn on the CPU.
    kCpuEmbedding,  // torch.nn.Embedding on the CPU: one standard normal filling thrown away, then one of deviation `value`.
    // From the model-parallel stream, for Mamba-2 (megatron/core/ssm/mamba_mixer.py):
    kUniform,   // In (-value, value).
    kMambaDt,   // The inverse of softplus of a time step, log-uniform in (0.001, 0.1).
    kMambaLog,  // The logarithm of a uniform number in (1, 16).
  };
  Kind kind = Kind::kConstant;
  float value = 0.0f;
  int64_t turn = 0;  // Neighbouring parameters of one kind are drawn in this order; equal turns in that of declaration.
};

// A parameter as a module wants it.
struct ParameterDeclaration {
  std::string name = {};
  Shape shape = {};
  InitRule rule = {};
  int axis = -1;                      // The one that tensor parallelism splits; -1: none.
  std::vector<int64_t> stripes = {};  // It is split in each of these stripes (ParameterSpec), given for this rank.
  bool trainable = true;
  bool of_stream = false;  // Of the residual stream: with sequence parallelism each rank has a part of its gradient.
};

// Draws a parameter in fp32 and rounds it to its dtype, on the context's device.
void InitializeParameter(const Context& context, const InitRule& rule, const Tensor& value, RngStreams* streams);

// Views of the parameters in the storage dtype: the parameters themselves where that is their dtype, else one F32 copy of the
// whole value buffer. What is not trainable stays F32.
class Weights {
 public:
  Weights() = default;
  // `store` must be allocated and outlive this object. Throws REASON_OUT_OF_MEMORY.
  Weights(const ParameterStore* store, DType storage);
  // The parameters have new values. The copies of those below `end` get them before they are read.
  void Expire() { fresh_below_ = 0; }
  void RefreshBelow(int end);
  const Tensor& value(int index) const { return values_[index]; }
  const Tensor& main_grad(int index) const { return main_grads_[index]; }
  // Those of `count` parameters that were declared one after another.
  std::span<const Tensor> values(int first, int count) const { return std::span(values_).subspan(first, count); }
  std::span<const Tensor> main_grads(int first, int count) const { return std::span(main_grads_).subspan(first, count); }
  int64_t bytes() const { return static_cast<int64_t>(memory_.capacity()); }

 private:
  const ParameterStore* store_ = nullptr;
  Arena memory_ = Arena::Planning();
  Tensor copy_;  // Empty if the parameters are used in place.
  int fresh_below_ = 0;
  std::vector<Tensor> values_, main_grads_;
};

}  // namespace mbridge
