// Matrix products through cuBLASLt with cached descriptors and algorithms: what Gemm and the attention of this folder share.
#pragma once

#include "engine/ops/fp8_gemm.h"
#include "engine/ops/gemm.h"

namespace mbridge::cuda {

// Scratch that a product may use, of the context's workspace. Algorithms that want more are not considered.
inline constexpr size_t kGemmWorkspaceBytes = size_t{64} << 20;

// `count` products of one shape; matrix i stands i strides (elements) after the first. A stride of 0 is one shared a or b.
struct GemmBatch {
  int count = 1;
  int64_t stride_a = 0, stride_b = 0, stride_c = 0;
};

// c = alpha op(a) op(b) (+ c) as Gemm, for the types that cuBLASLt multiplies: a and b BF16 or F16 into the same type or F32, F32
// (no TF32) into F32. Adds up split sums in F32 only. The first product of a shape chooses an algorithm (gemm_tuning.h): unless
// the stream is being captured it then waits for the stream and may allocate; later ones do neither.
void CublasGemm(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options,
                const GemmBatch& batch = {});

// Fp8Gemm, whose conditions the caller has checked.
void CublasFp8Gemm(const Context& context, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c,
                   const Fp8GemmOptions& options);

// Whether this device multiplies 8-bit matrices with scales of blocks.
bool HasFp8BlockProducts(const Context& context);

}  // namespace mbridge::cuda
