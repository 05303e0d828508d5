// Matrix product. On the CPU through oneDNN, on CUDA through cuBLASLt (cuda/gemm_tuning.h says how it chooses its algorithms).
#pragma once

#include "engine/core/op.h"

namespace mbridge {

// A row-major matrix, possibly a window of a wider one.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // Elements from one row to the next.
};

// All of a tensor as [size / last dimension, last dimension].
Matrix AsMatrix(const Tensor& tensor);
// Rows [begin, begin + count).
Matrix RowsOf(const Matrix& matrix, int64_t begin, int64_t count);
// Columns [begin, begin + count).
Matrix ColumnsOf(const Matrix& matrix, int64_t begin, int64_t count);

struct GemmOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;  // Adds to c (F32 only).
  float alpha = 1.0f;
};

// c = alpha op(a) op(b) (+ c): sums in F32, one rounding to c's type (BF16, F16 or F32). a and b have one type: BF16, F16 or F32.
// BF16 is multiplied natively where NativeBF16Products(); other narrow inputs are widened first, which gives the same products.
// c must not overlap a or b. Throws EngineError for shapes that do not fit. From inside an OpenMP region it uses one thread.
// CUDA: F32 is multiplied as F32 (no TF32); uses up to 64 MiB of the workspace; the first product of a shape waits for the
// stream.
extern Op<void(const Context&, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions&)> Gemm;

// Whether oneDNN has BF16 products on this CPU (AVX512-BF16 or AMX, and ONEDNN_MAX_CPU_ISA allows them).
bool NativeBF16Products();

}  // namespace mbridge
