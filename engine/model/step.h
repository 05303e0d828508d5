// What every module of a model needs to know in one microbatch.
#pragma once

#include "engine/core/op.h"
#include "engine/core/torch_random.h"
#include "engine/model/gpt_config.h"
#include "engine/model/tensor_parallel.h"
#include "engine/ops/dropout_mask.h"

namespace mbridge {

class NarrowLinears;

// A CUDA graph is recorded once and replayed at other positions of the streams.
struct RecordedStreams {
  const uint64_t* words =
      nullptr;  // On the device: seed and offset of default_stream, of model_parallel, where the graph begins.
  uint64_t default_offset = 0, model_parallel_offset = 0;  // The same offsets when it was recorded.
};

struct Step {
  Context context;
  const GptConfig* config = nullptr;  // Of this rank's share (ShareOf).
  DType precision = DType::kF32;      // Model dtype: where values are rounded.
  DType storage = DType::kF32;        // Dtype of activations; F32 also holds BF16 and F16 values (engine/ops/cpu/precision.h).
  int64_t seq_length = 0;
  int64_t micro_batch_size = 0;
  Tensor rotary_cosine, rotary_sine;              // FillRotaryTables; empty without rotary positions.
  Tensor rotary_local_cosine, rotary_local_sine;  // Of rotary_base_local, for the layers with a window; else empty.
  TensorParallel tensor_parallel;
  NarrowLinears* narrow = nullptr;  // Linear layers in 8 or 4 bits.
  float grad_scale = 0.0f;          // Upstream gradient of auxiliary losses: 1 / microbatches times the loss scale.
  RngStreams* streams = nullptr;    // Null in evaluation: no dropout, nothing is kept for backward.

  const RecordedStreams* recorded = nullptr;  // While a CUDA graph is recorded.

  bool training() const { return streams != nullptr; }
  // Weight gradients go from the matrix product into the fp32 main gradients, without a rounding to the model dtype in between
  // (Megatron-LM's gradient_accumulation_fusion): one pass over memory less, so always on a GPU.
  bool fuse_gradients() const { return context.device != DeviceType::kCpu; }
  // Rows of the residual stream on this rank: [stream_length(), b, h].
  int64_t stream_length() const { return tensor_parallel.StreamLength(seq_length); }
  // Where the hidden dropouts draw from. Ranks that hold the same rows draw the same mask.
  PhiloxStream* hidden_dropout_stream() const {
    return tensor_parallel.sequence_parallel ? &streams->model_parallel : &streams->default_stream;
  }
};

// Where the next mask of one of the step's two streams is drawn.
MaskPosition PositionOf(const Step& step, const PhiloxStream* stream);

// Draws the keep mask of an eager dropout and advances the stream.
void DrawEagerMask(const Step& step, PhiloxStream* stream, double p, const Tensor& keep);

}  // namespace mbridge
