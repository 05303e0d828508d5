#include "engine/ops/gemm.h"

#include "engine/ops/cuda/cublas_gemm.h"
#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {
namespace {

template <class A, class B>
__global__ void ConvertRowsKernel(const A* from, int64_t from_stride, B* to, int64_t to_stride, int64_t rows, int64_t cols) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * cols; i += int64_t{gridDim.x} * blockDim.x) {
    to[i / cols * to_stride + i % cols] = Narrow<B>(Widen(from[i / cols * from_stride + i % cols]));
  }
}

void ConvertRows(const Context& context, const Matrix& from, const Matrix& to) {
  WithType(from.dtype, [&]<class A>(A) {
    WithType(to.dtype, [&]<class B>(B) {
      ConvertRowsKernel<<<GridOf(to.rows * to.cols, 256), 256, 0, StreamOf(context)>>>(
          static_cast<const A*>(from.data), from.stride, static_cast<B*>(to.data), to.stride, to.rows, to.cols);
    });
  });
  MB_CUDA_LAUNCHED();
}

bool IsNative(const Matrix& a, const Matrix& c) { return c.dtype == DType::kF32 || c.dtype == a.dtype; }

// cuBLASLt has no result of c's type: blocks of rows in F32 in the workspace's second half, then narrowed.
void GemmThroughF32(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  Context half = context;
  half.workspace_bytes = context.workspace_bytes / 2 / 256 * 256;
  const int64_t rows_at_once = static_cast<int64_t>((context.workspace_bytes - half.workspace_bytes) / sizeof(float)) / c.cols;
  if (rows_at_once == 0) ThrowEngineError("a {} product of {} columns wants more workspace", NameOf(c.dtype), c.cols);
  float* wide = reinterpret_cast<float*>(static_cast<char*>(context.workspace) + half.workspace_bytes);
  for (int64_t begin = 0; begin < c.rows; begin += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, c.rows - begin);
    const Matrix part{wide, DType::kF32, rows, c.cols, c.cols};
    CublasGemm(half, options.transpose_a ? ColumnsOf(a, begin, rows) : RowsOf(a, begin, rows), b, part, options);
    ConvertRows(context, part, RowsOf(c, begin, rows));
  }
}

void GemmCuda(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  const int64_t m = options.transpose_a ? a.cols : a.rows, k = options.transpose_a ? a.rows : a.cols;
  const int64_t k_of_b = options.transpose_b ? b.cols : b.rows, n = options.transpose_b ? b.rows : b.cols;
  if (k != k_of_b || m != c.rows || n != c.cols) {
    ThrowEngineError("product [{}, {}] x [{}, {}] into [{}, {}]", m, k, k_of_b, n, c.rows, c.cols);
  }
  if (a.dtype != b.dtype) ThrowEngineError("product of {} and {}", NameOf(a.dtype), NameOf(b.dtype));
  if (options.accumulate && c.dtype != DType::kF32) ThrowEngineError("product added to {}: F32 only", NameOf(c.dtype));
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (options.accumulate) return;
    const size_t size = SizeOf(c.dtype);
    return MB_CUDA(cudaMemset2DAsync(c.data, c.stride * size, 0, n * size, m, StreamOf(context)));
  }
  if (IsNative(a, c)) return CublasGemm(context, a, b, c, options);
  GemmThroughF32(context, a, b, c, options);
}

void Fp8GemmCuda(const Context& context, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c, const Fp8GemmOptions& options) {
  CheckFp8Gemm(a, b, c, options);
  if (c.rows == 0 || c.cols == 0) return;
  if (a.cols == 0)
    return GemmCuda(context, {nullptr, c.dtype, c.rows, 0, 0}, {nullptr, c.dtype, c.cols, 0, 0}, c,
                    {.transpose_b = true, .accumulate = options.accumulate});
  CublasFp8Gemm(context, a, b, c, options);
}

void BlockProductsCuda(const Context& context, bool* available) { *available = HasFp8BlockProducts(context); }

const bool g_registered = (Gemm.cuda = &GemmCuda, Fp8Gemm.cuda = &Fp8GemmCuda, Fp8BlockProducts.cuda = &BlockProductsCuda, true);

}  // namespace
}  // namespace mbridge::cuda
