#include "engine/model/narrow_linears.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "engine/comm/communicator.h"
#include "engine/core/device.h"
#include "engine/ops/gemm.h"

namespace mbridge {
namespace {

Tensor AsRows(const Tensor& x) {
  const int64_t cols = x.shape[x.shape.rank() - 1];
  return x.View({x.size() / cols, cols});
}

// The first elements of a scratch.
Tensor Part(const Tensor& scratch, const Shape& shape) {
  if (shape.NumElements() > scratch.size()) ThrowEngineError("{} in a scratch of {}", shape.ToString(), scratch.shape.ToString());
  return {scratch.data, scratch.dtype, scratch.device, shape};
}

// Of the scales that Fp8QuantizeByAmax wrote.
const float* InverseOf(const Tensor& scales) { return scales.as<float>() + 2 * kFp8ScalePitch; }

Fp8Matrix Codes(const Tensor& codes, Fp8Format format, const float* inverse) {
  return {codes.data, format, inverse, codes.shape[0], codes.shape[1], codes.shape[1]};
}

Fp8Matrix Codes(const Tensor& codes, Fp8Format format, const Tensor& scales, Fp8Scaling scaling) {
  return {codes.data, format, scales.as<float>(), codes.shape[0], codes.shape[1], codes.shape[1], scaling};
}

// What the sides of the products are multiples of.
int64_t SideOf(const LowPrecisionOptions& options) { return options.recipe == ScalingRecipe::kMxfp8 ? 32 : 16; }

BlockFormat BlockFormatOf(ScalingRecipe recipe) {
  if (recipe == ScalingRecipe::kNvfp4) return BlockFormat::kNvfp4;
  return recipe == ScalingRecipe::kMxfp8 ? BlockFormat::kMxfp8 : BlockFormat::kFp8;
}

}  // namespace

NarrowLinears::NarrowLinears(const LowPrecisionOptions& options, const Context& context, DType storage)
    : options_(options), context_(context), storage_(storage), draws_(std::make_shared<int64_t>(0)) {}

int NarrowLinears::Add(const std::string& name, int weight, int64_t out, int64_t in) {
  const int64_t block = SideOf(options_);
  if (out % block != 0 || in % block != 0) {
    throw EngineError(
        v1::REASON_INVALID_CONFIG,
        fmt::format("{} is [{}, {}] on a rank: with model.fp8 or model.fp4 its sides are multiples of {}", name, out, in, block));
  }
  layers_.push_back({weight, out, in, {}, {}, {}, {}});
  max_in_ = std::max(max_in_, in);
  max_out_ = std::max(max_out_, out);
  return static_cast<int>(layers_.size()) - 1;
}

bool NarrowLinears::HasBlockProducts(int64_t tokens) const {
  if (options_.recipe != ScalingRecipe::kBlockwise || tokens % kFp8Block != 0) return false;
  for (const Layer& layer : layers_) {
    if (layer.out % kFp8Block != 0 || layer.in % kFp8Block != 0) return false;
  }
  if (context_.device == DeviceType::kCuda && Fp8BlockProducts.cuda == nullptr) return true;  // A plan for another process.
  bool available = false;
  Fp8BlockProducts(context_, &available);
  return available;
}

void NarrowLinears::AllocateCopies(Arena* arena, Layer* layer) const {
  if (takes_codes()) {
    layer->copy = arena->Allocate(DType::kU8, {layer->out, layer->in});
    layer->backward_copy = arena->Allocate(DType::kU8, {layer->in, layer->out});
    if (block_codes_) {
      layer->scales = arena->Allocate(DType::kF32, {Fp8ScaleCount(Fp8Scaling::kSquares, layer->out, layer->in)});
      layer->backward_scales = arena->Allocate(DType::kF32, {Fp8ScaleCount(Fp8Scaling::kSquares, layer->in, layer->out)});
    } else {
      layer->scales = arena->Allocate(DType::kF32, {3, kFp8ScalePitch});
    }
    return;
  }
  layer->copy = layer->backward_copy = arena->Allocate(storage_, {layer->out, layer->in});
  // Blocks that are no squares run along the sum of each product.
  if (options_.recipe == ScalingRecipe::kMxfp8) layer->backward_copy = arena->Allocate(storage_, {layer->out, layer->in});
}

void NarrowLinears::AllocateScratch(Arena* arena, int64_t tokens) {
  if (!takes_codes()) {
    wide_input_ = arena->Allocate(storage_, {tokens * std::max(max_in_, max_out_)});
    wide_gradient_ = arena->Allocate(storage_, {tokens * max_out_});
    amax_ = arena->Allocate(DType::kF32, {1});
    return;
  }
  input_codes_ = arena->Allocate(DType::kU8, {tokens * max_in_});
  gradient_codes_ = arena->Allocate(DType::kU8, {tokens * max_out_});
  if (options_.weight_gradients) gradient_transposed_ = arena->Allocate(DType::kU8, {tokens * max_out_});
  const auto blocks = [&](int64_t width) { return arena->Allocate(DType::kF32, {tokens * width / kFp8Block}); };
  gradient_scales_ = block_codes_ ? blocks(max_out_) : arena->Allocate(DType::kF32, {3, kFp8ScalePitch});
  if (!block_codes_) return;
  input_scales_ = blocks(max_in_);
  if (options_.weight_gradients) gradient_transposed_scales_ = blocks(max_out_);
}

int64_t NarrowLinears::Plan(int64_t tokens) {
  if (empty()) return 0;
  block_codes_ = HasBlockProducts(tokens);
  NarrowLinears planned(options_, context_, storage_);
  planned.layers_ = layers_;
  planned.max_in_ = max_in_;
  planned.max_out_ = max_out_;
  planned.block_codes_ = block_codes_;
  Arena plan = Arena::Planning(context_.device);
  for (Layer& layer : planned.layers_) planned.AllocateCopies(&plan, &layer);
  planned.AllocateScratch(&plan, tokens);
  return static_cast<int64_t>(plan.peak());
}

void NarrowLinears::Prepare(int64_t tokens) {
  if (empty()) return;
  const int64_t block = SideOf(options_);
  if (tokens % block != 0) {
    throw EngineError(
        v1::REASON_INVALID_CONFIG,
        fmt::format("train.micro_batch_size times model.seq_length is {} with model.fp8 or model.fp4: a multiple of {}", tokens,
                    block));
  }
  block_codes_ = HasBlockProducts(tokens);
  const auto allocate = [&](Arena* arena) {
    for (Layer& layer : layers_) AllocateCopies(arena, &layer);
    AllocateScratch(arena, tokens);
  };
  Arena plan = Arena::Planning(context_.device);
  allocate(&plan);
  memory_ = Arena(plan.peak(), context_.device);
  allocate(&memory_);
  if (options_.recipe != ScalingRecipe::kDelayed || state_memory_.capacity() > 0) return;
  const auto allocate_state = [&](Arena* arena) {
    const auto count = static_cast<int64_t>(layers_.size());
    for (DelayedScales* scales : {&of_inputs_, &of_gradients_}) {
      scales->history = arena->Allocate(DType::kF32, {options_.history_length, count});
      scales->scale = arena->Allocate(DType::kF32, {count});
      scales->inverse = arena->Allocate(DType::kF32, {count, kFp8ScalePitch});
    }
  };
  Arena state_plan = Arena::Planning(context_.device);
  allocate_state(&state_plan);
  state_memory_ = Arena(state_plan.peak(), context_.device);
  allocate_state(&state_memory_);
  for (const auto& [name, tensor] : StateTensors()) DeviceOf(context_.device).Zero(context_, tensor.data, tensor.bytes());
}

NarrowInput NarrowLinears::AllocateInput(Arena* arena, int64_t tokens, int64_t in, bool whole) const {
  NarrowInput input;
  if (options_.per_tensor()) input.scales = arena->Allocate(DType::kF32, {3, kFp8ScalePitch});
  if (block_codes_ && KeepsCodes(whole)) input.scales = arena->Allocate(DType::kF32, {tokens * in / kFp8Block});
  if (KeepsCodes(whole)) input.codes = arena->Allocate(DType::kU8, {in, tokens});
  return input;
}

Tensor NarrowLinears::StartMaximum(const Tensor& scales) const {
  DeviceOf(context_.device).Zero(context_, scales.data, sizeof(float));
  return {scales.data, DType::kF32, scales.device, {1}};
}

Tensor NarrowLinears::StartGradientMaximum(const Tensor& dy) {
  measured_gradient_ = dy.data;
  return StartMaximum(gradient_scales_);
}

const float* NarrowLinears::QuantizeTensor(Role role, int layer, const Tensor& x, const Tensor& scales, const Tensor& codes,
                                           const Tensor& transposed, bool record, bool measured) {
  const bool delayed = options_.recipe == ScalingRecipe::kDelayed && role != Role::kWeight;
  Tensor maximum;
  if (delayed && record) maximum = {DelayedOf(role).history.as<float>() + layer, DType::kF32, context_.device, {1}};
  if (delayed && has_scales_) {
    const DelayedScales& state = DelayedOf(role);
    Fp8Quantize(context_, x, state.scale.Rows(layer, 1), FormatOf(role), codes, transposed, maximum);
    return state.inverse.as<float>() + layer * kFp8ScalePitch;
  }
  if (!measured) Fp8Amax(context_, x, StartMaximum(scales));
  if (!maximum.empty()) Fp8Amax(context_, x, maximum);
  Fp8QuantizeByAmax(context_, x, {.format = FormatOf(role), .margin = delayed ? options_.margin : 0}, scales, codes, transposed);
  return InverseOf(scales);
}

Tensor NarrowLinears::QuantizeBlocks(Role role, const Tensor& x, bool down_rows, const Tensor& to) {
  const bool nvfp4 = options_.recipe == ScalingRecipe::kNvfp4;
  BlockQuantizeOptions options{.format = BlockFormatOf(options_.recipe), .down_rows = down_rows};
  options.element = FormatOf(role) == Fp8Format::kE5M2 ? kE5M2Float : kE4M3Float;
  options.square = role == Role::kWeight && options_.recipe != ScalingRecipe::kMxfp8;
  Tensor source = x;
  if (nvfp4) {
    // Transformer Engine's recipe: gradients are rounded by chance, and operands that are summed over the tokens are rotated, so
    // that outliers spread.
    options.element = kE2M1Float;
    options.stochastic = role == Role::kGradient;
    if (options.stochastic) options.seed = static_cast<uint64_t>((*draws_)++) << 32;
    if (down_rows && role != Role::kWeight) {
      HadamardDownRows(context_, x, to);
      source = to;
    }
    DeviceOf(context_.device).Zero(context_, amax_.data, amax_.bytes());
    Fp8Amax(context_, source, amax_);
  }
  BlockQuantize(context_, source, options, amax_, to);
  return to;
}

void NarrowLinears::OnWeightsChanged(const Weights& weights) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const Tensor& weight = weights.value(layer.weight);
    if (options_.per_tensor()) {
      QuantizeTensor(Role::kWeight, static_cast<int>(i), weight, layer.scales, layer.copy, layer.backward_copy, false, false);
      continue;
    }
    if (block_codes_) {
      Fp8BlockQuantize(context_, weight, Fp8Format::kE4M3, true, layer.copy, layer.scales, layer.backward_copy,
                       layer.backward_scales);
      continue;
    }
    QuantizeBlocks(Role::kWeight, weight, false, layer.copy);
    if (layer.backward_copy.data != layer.copy.data) QuantizeBlocks(Role::kWeight, weight, true, layer.backward_copy);
  }
}

bool NarrowLinears::UpdateScales(Communicator* ranks) {
  if (options_.recipe != ScalingRecipe::kDelayed || empty()) return false;
  for (const Role role : {Role::kInput, Role::kGradient}) {
    const DelayedScales& state = DelayedOf(role);
    if (ranks != nullptr && ranks->size() > 1) ranks->AllReduce(state.history.Rows(0, 1), ReduceOp::kMax);
    Fp8DelayedScales(context_, state.history, options_.most_recent, {.format = FormatOf(role), .margin = options_.margin},
                     state.scale, state.inverse);
  }
  return !std::exchange(has_scales_, true);
}

void NarrowLinears::Forward(int layer, const Tensor& x, const NarrowInput& kept, bool training, const Tensor& y) {
  const Layer& l = layers_[layer];
  const Tensor rows = AsRows(x);
  if (block_codes_) return BlockForward(l, rows, kept, training, y);
  if (!options_.per_tensor()) {
    const Tensor input = QuantizeBlocks(Role::kInput, rows, false, Part(wide_input_, rows.shape));
    return Gemm(context_, AsMatrix(input), AsMatrix(l.copy), AsMatrix(y), {.transpose_b = true});
  }
  const Tensor codes = Part(input_codes_, rows.shape);
  const float* inverse = QuantizeTensor(Role::kInput, layer, rows, kept.scales, codes, training ? kept.codes : Tensor(), training,
                                        kept.input_measured);
  Fp8Gemm(context_, Codes(codes, Fp8Format::kE4M3, inverse), Codes(l.copy, Fp8Format::kE4M3, InverseOf(l.scales)), AsMatrix(y),
          {.fast_accumulate = true});
}

void NarrowLinears::InputGradient(int layer, const Tensor& dy, const Tensor& dx) {
  const Layer& l = layers_[layer];
  const Tensor rows = AsRows(dy);
  if (block_codes_) return BlockInputGradient(l, rows, dx);
  if (!options_.per_tensor()) {
    const Tensor gradient = QuantizeBlocks(Role::kGradient, rows, false, Part(wide_gradient_, rows.shape));
    return Gemm(context_, AsMatrix(gradient), AsMatrix(l.backward_copy), AsMatrix(dx), {});
  }
  const Tensor codes = Part(gradient_codes_, rows.shape);
  const Tensor transposed = options_.weight_gradients ? Part(gradient_transposed_, {rows.shape[1], rows.shape[0]}) : Tensor();
  const float* inverse = QuantizeTensor(Role::kGradient, layer, rows, gradient_scales_, codes, transposed, true,
                                        std::exchange(measured_gradient_, nullptr) == dy.data);
  Fp8Gemm(context_, Codes(codes, FormatOf(Role::kGradient), inverse),
          Codes(l.backward_copy, Fp8Format::kE4M3, InverseOf(l.scales)), AsMatrix(dx), {});
}

void NarrowLinears::WeightGradient(int layer, const Tensor& dy, const Tensor& x, const NarrowInput& kept,
                                   const Tensor& main_grad) {
  const GemmOptions add{.transpose_a = true, .accumulate = true};
  if (!options_.weight_gradients) return Gemm(context_, AsMatrix(dy), AsMatrix(x), AsMatrix(main_grad), add);
  const Tensor gradient = AsRows(dy);
  if (block_codes_) return BlockWeightGradient(gradient, x, kept, main_grad);
  if (!options_.per_tensor()) {
    const Tensor input = AsRows(x);
    const Tensor left = QuantizeBlocks(Role::kGradient, gradient, true, Part(wide_gradient_, gradient.shape));
    const Tensor right = QuantizeBlocks(Role::kInput, input, true, Part(wide_input_, input.shape));
    return Gemm(context_, AsMatrix(left), AsMatrix(right), AsMatrix(main_grad), add);
  }
  const bool current = options_.recipe == ScalingRecipe::kCurrent || !has_scales_;
  const float* inverse = current ? InverseOf(kept.scales) : of_inputs_.inverse.as<float>() + layer * kFp8ScalePitch;
  Tensor codes = kept.codes;
  if (codes.empty()) {
    const Tensor input = AsRows(x);
    codes = Part(input_codes_, {input.shape[1], input.shape[0]});
    inverse = QuantizeTensor(Role::kInput, layer, input, kept.scales, {}, codes, false, kept.input_measured);
  }
  const float* gradient_inverse =
      current ? InverseOf(gradient_scales_) : of_gradients_.inverse.as<float>() + layer * kFp8ScalePitch;
  const Tensor left = Part(gradient_transposed_, {gradient.shape[1], gradient.shape[0]});
  Fp8Gemm(context_, Codes(left, FormatOf(Role::kGradient), gradient_inverse), Codes(codes, Fp8Format::kE4M3, inverse),
          AsMatrix(main_grad), {.accumulate = true});
}

void NarrowLinears::BlockForward(const Layer& layer, const Tensor& x, const NarrowInput& kept, bool training, const Tensor& y) {
  const Tensor codes = Part(input_codes_, x.shape), scales = Part(input_scales_, {x.size() / kFp8Block});
  const bool keep = training && !kept.codes.empty();
  Fp8BlockQuantize(context_, x, Fp8Format::kE4M3, false, codes, scales, keep ? kept.codes : Tensor(),
                   keep ? kept.scales : Tensor());
  Fp8Gemm(context_, Codes(codes, Fp8Format::kE4M3, scales, Fp8Scaling::kVectors),
          Codes(layer.copy, Fp8Format::kE4M3, layer.scales, Fp8Scaling::kSquares), AsMatrix(y), {});
}

void NarrowLinears::BlockInputGradient(const Layer& layer, const Tensor& dy, const Tensor& dx) {
  const Fp8Format format = FormatOf(Role::kGradient);
  const Tensor codes = Part(gradient_codes_, dy.shape), scales = Part(gradient_scales_, {dy.size() / kFp8Block});
  Tensor transposed, transposed_scales;
  if (options_.weight_gradients) {
    transposed = Part(gradient_transposed_, {dy.shape[1], dy.shape[0]});
    transposed_scales = Part(gradient_transposed_scales_, scales.shape);
  }
  Fp8BlockQuantize(context_, dy, format, false, codes, scales, transposed, transposed_scales);
  Fp8Gemm(context_, Codes(codes, format, scales, Fp8Scaling::kVectors),
          Codes(layer.backward_copy, Fp8Format::kE4M3, layer.backward_scales, Fp8Scaling::kSquares), AsMatrix(dx), {});
}

void NarrowLinears::BlockWeightGradient(const Tensor& dy, const Tensor& x, const NarrowInput& kept, const Tensor& main_grad) {
  Tensor codes = kept.codes, scales = kept.scales;
  if (codes.empty()) {
    const Tensor input = AsRows(x);
    codes = Part(input_codes_, {input.shape[1], input.shape[0]});
    scales = Part(input_scales_, {input.size() / kFp8Block});
    Fp8BlockQuantize(context_, input, Fp8Format::kE4M3, false, {}, {}, codes, scales);
  }
  const Tensor left = Part(gradient_transposed_, {dy.shape[1], dy.shape[0]});
  const Tensor left_scales = Part(gradient_transposed_scales_, {dy.size() / kFp8Block});
  Fp8Gemm(context_, Codes(left, FormatOf(Role::kGradient), left_scales, Fp8Scaling::kVectors),
          Codes(codes, Fp8Format::kE4M3, scales, Fp8Scaling::kVectors), AsMatrix(main_grad), {.accumulate = true});
}

std::vector<std::pair<std::string, Tensor>> NarrowLinears::StateTensors() const {
  if (empty()) return {};
  if (options_.recipe == ScalingRecipe::kNvfp4) {
    return {{"fp4.draws", {draws_.get(), DType::kI64, DeviceType::kCpu, {1}}}};
  }
  if (options_.recipe != ScalingRecipe::kDelayed) return {};
  return {{"fp8.inputs.history", of_inputs_.history},   {"fp8.inputs.scale", of_inputs_.scale},
          {"fp8.inputs.inverse", of_inputs_.inverse},   {"fp8.gradients.history", of_gradients_.history},
          {"fp8.gradients.scale", of_gradients_.scale}, {"fp8.gradients.inverse", of_gradients_.inverse}};
}

void NarrowLinears::Restored() {
  if (options_.recipe != ScalingRecipe::kDelayed || empty()) return;
  float first = 0;  // Scales are above 0 once they were made.
  Device& device = DeviceOf(context_.device);
  device.CopyToHost(context_, &first, of_inputs_.scale.data, sizeof(first));
  device.Synchronize(context_);
  has_scales_ = first > 0;
}

}  // namespace mbridge
