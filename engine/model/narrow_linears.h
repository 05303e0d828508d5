// The linear layers that run on 8-bit or 4-bit operands (low_precision.h): copies of their weights, scales, and the three
// products. Products take 8-bit codes where the device has such products (a scale for each tensor; by blocks of 128 on Hopper);
// elsewhere operands are quantised and widened again, and products are ordinary ones.
//
// Weights are quantised once after each change, by their own largest value. With delayed scaling inputs and gradients take
// scales of earlier iterations; the first iteration has none and takes current ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/arena.h"
#include "engine/core/op.h"
#include "engine/model/low_precision.h"
#include "engine/model/weights.h"
#include "engine/ops/block_quantize.h"
#include "engine/ops/fp8_gemm.h"

namespace mbridge {

class Communicator;

// What a layer's forward keeps of its input for the weight gradient.
struct NarrowInput {
  Tensor codes;  // U8 [in, tokens], transposed; empty: backward takes the input itself.
  // F32. A scale for each tensor: [3], largest value, scale, 1 / scale. Blocks: those of `codes`.
  Tensor scales;
  bool input_measured = false;  // Who makes the input takes its largest value: into StartMaximum(scales).
};

class NarrowLinears {
 public:
  NarrowLinears() = default;
  NarrowLinears(const LowPrecisionOptions& options, const Context& context, DType storage);

  // A layer with a weight [out, in] of this rank; its index here. `weight`: index of the parameter. All come before Prepare.
  // Throws REASON_INVALID_CONFIG naming a weight whose sides make no whole blocks.
  int Add(const std::string& name, int weight, int64_t out, int64_t in);
  bool empty() const { return layers_.empty(); }
  // Memory for `tokens` tokens at once; the state of delayed scaling stays. Throws REASON_INVALID_CONFIG for tokens that make no
  // whole blocks, REASON_OUT_OF_MEMORY.
  void Prepare(int64_t tokens);
  // The bytes that Prepare takes, without taking them.
  int64_t Plan(int64_t tokens);
  int64_t bytes() const { return static_cast<int64_t>(memory_.capacity()); }

  // Whether backward needs no input but the codes. `whole`: the input is at hand wholly, not as this rank's part of it.
  bool KeepsCodes(bool whole) const { return takes_codes() && options_.weight_gradients && whole; }
  // Whether products take 8-bit operands; otherwise they are emulated. Known after Plan or Prepare.
  bool takes_codes() const { return options_.per_tensor() || block_codes_; }
  // Whether makers of inputs and gradients may measure them.
  bool TakesMaxima() const { return options_.recipe == ScalingRecipe::kCurrent; }
  Tensor StartMaximum(const Tensor& scales) const;
  // Where the maker of the gradient `dy` takes its largest value; InputGradient of the same memory, if it comes next, uses it.
  Tensor StartGradientMaximum(const Tensor& dy);
  NarrowInput AllocateInput(Arena* arena, int64_t tokens, int64_t in, bool whole) const;

  // Quantises the weights anew.
  void OnWeightsChanged(const Weights& weights);
  // The end of an iteration: delayed scaling's scales from the largest values over `ranks`. Whether those are its first, so that
  // forward and backward go another way from now on.
  bool UpdateScales(Communicator* ranks);

  // y [..., out] from x [..., in]. `training`: fills `kept` and takes part in delayed scaling.
  void Forward(int layer, const Tensor& x, const NarrowInput& kept, bool training, const Tensor& y);
  // dx from dy.
  void InputGradient(int layer, const Tensor& dy, const Tensor& dx);
  // Adds to the main gradient [out, in]. After InputGradient with the same dy. `x` is not read where `kept` has codes.
  void WeightGradient(int layer, const Tensor& dy, const Tensor& x, const NarrowInput& kept, const Tensor& main_grad);

  // State that a resumed run needs, by name; call Restored after it was filled.
  std::vector<std::pair<std::string, Tensor>> StateTensors() const;
  void Restored();

 private:
  struct Layer {
    int weight;
    int64_t out, in;
    Tensor copy, backward_copy;  // U8 [out, in] and its transpose; emulated: both [out, in] in the storage dtype.
    Tensor scales, backward_scales;
  };
  struct DelayedScales {
    Tensor history;         // F32 [iterations, layers].
    Tensor scale, inverse;  // F32 [layers].
  };
  enum class Role : uint8_t { kInput, kWeight, kGradient };

  Fp8Format FormatOf(Role role) const {
    return role == Role::kGradient && options_.wide_gradients ? Fp8Format::kE5M2 : Fp8Format::kE4M3;
  }
  void AllocateCopies(Arena* arena, Layer* layer) const;
  void AllocateScratch(Arena* arena, int64_t tokens);
  bool HasBlockProducts(int64_t tokens) const;
  void BlockForward(const Layer& layer, const Tensor& x, const NarrowInput& kept, bool training, const Tensor& y);
  void BlockInputGradient(const Layer& layer, const Tensor& dy, const Tensor& dx);
  void BlockWeightGradient(const Tensor& dy, const Tensor& x, const NarrowInput& kept, const Tensor& main_grad);
  // 8-bit codes of x [rows, cols]; where 1 / scale lies.
  const float* QuantizeTensor(Role role, int layer, const Tensor& x, const Tensor& scales, const Tensor& codes,
                              const Tensor& transposed, bool record, bool measured);
  // What x stands for after quantising blocks, in `to`. down_rows: blocks along the tokens, for weight gradients.
  Tensor QuantizeBlocks(Role role, const Tensor& x, bool down_rows, const Tensor& to);
  DelayedScales& DelayedOf(Role role) { return role == Role::kGradient ? of_gradients_ : of_inputs_; }

  LowPrecisionOptions options_;
  Context context_;
  DType storage_ = DType::kF32;
  std::vector<Layer> layers_;
  int64_t max_in_ = 0, max_out_ = 0;
  Arena memory_ = Arena::Planning();
  Tensor wide_input_, wide_gradient_;                          // Blocks: operands, storage dtype.
  Tensor input_codes_, gradient_codes_, gradient_transposed_;  // U8.
  Tensor gradient_scales_;                                     // F32 [3], or of blocks.
  Tensor input_scales_, gradient_transposed_scales_;           // F32, of blocks.
  Tensor amax_;                                                // F32 [1], of NVFP4.
  Arena state_memory_ = Arena::Planning();
  DelayedScales of_inputs_, of_gradients_;
  const void* measured_gradient_ = nullptr;  // Whose largest value gradient_scales_ begins with.
  bool block_codes_ = false;
  bool has_scales_ = false;         // Delayed scaling has seen an iteration.
  std::shared_ptr<int64_t> draws_;  // Of stochastic rounding so far.
};

}  // namespace mbridge
