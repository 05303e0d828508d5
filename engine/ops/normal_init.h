// Normal draws of PyTorch's CUDA generator, made where the weights are.
#pragma once

#include "engine/core/op.h"
#include "engine/core/torch_random.h"

namespace mbridge {

// tensor.normal_(mean, std) at the stream's position, which the caller advances by CudaDrawAdvance. F32 draws, rounded once to
// the tensor's dtype (F32, BF16 or F16). On CUDA the bits are PyTorch's; on the CPU CudaNormal's (torch_random.h says how near).
extern Op<void(const Context&, PhiloxStream position, int sm_count, float mean, float std, const Tensor& out)> DrawNormal;

}  // namespace mbridge
