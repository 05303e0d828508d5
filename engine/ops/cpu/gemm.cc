#include "engine/ops/gemm.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include <dnnl.hpp>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

// Rows and columns of op(x).
std::pair<int64_t, int64_t> ShapeOf(const Matrix& x, bool transpose) {
  return transpose ? std::pair(x.cols, x.rows) : std::pair(x.rows, x.cols);
}

// Rows a multiple of 4 KiB apart fall into few cache sets: where oneDNN reads a transposed matrix in place (narrow results) that
// costs half the speed, so such a matrix is copied with padded rows first.
Matrix WithPaddedRows(const Matrix& a, bool transpose, int64_t result_columns) {
  constexpr int64_t kAliasing = 1024, kNarrow = 512, kPadding = 16;
  if (!transpose || a.stride % kAliasing != 0 || result_columns > kNarrow || a.rows < kNarrow) return a;
  thread_local std::vector<float> buffer;  // Grows to the largest such matrix once.
  const int64_t stride = a.cols + kPadding;
  if (static_cast<int64_t>(buffer.size()) < a.rows * stride) buffer.resize(a.rows * stride);
  float* to = buffer.data();
  const float* from = static_cast<const float*>(a.data);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < a.rows; ++row) std::copy_n(from + row * a.stride, a.cols, to + row * stride);
  return {to, DType::kF32, a.rows, a.cols, stride};
}

void ProductF32(const Matrix& matrix_a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  const Matrix a = WithPaddedRows(matrix_a, options.transpose_a, c.cols);
  const auto [m, k] = ShapeOf(a, options.transpose_a);
  const dnnl_status_t status =
      dnnl_sgemm(options.transpose_a ? 'T' : 'N', options.transpose_b ? 'T' : 'N', m, c.cols, k, options.alpha,
                 static_cast<const float*>(a.data), a.stride, static_cast<const float*>(b.data), b.stride,
                 options.accumulate ? 1.0f : 0.0f, static_cast<float*>(c.data), c.stride);
  if (status != dnnl_success)
    ThrowEngineError("oneDNN f32 product [{}, {}] x [{}, {}] failed with status {}", m, k, k, c.cols, int(status));
}

const dnnl::engine& CpuEngine() {
  static const auto* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

dnnl::memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc DescriptorOf(const Matrix& x, bool transpose) {
  const auto [rows, cols] = ShapeOf(x, transpose);
  return {{rows, cols}, TypeOf(x.dtype), transpose ? dnnl::memory::dims{1, x.stride} : dnnl::memory::dims{x.stride, 1}};
}

// A primitive and its descriptors, made once per shape.
struct Product {
  dnnl::memory::desc a, b, c;
  dnnl::matmul primitive;
  std::vector<std::byte> scratchpad;
  dnnl::memory::desc scratchpad_desc;
};

using ProductKey = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, DType, bool, bool, bool, float>;

Product* FindProduct(const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  static auto* products = new std::map<ProductKey, Product>;
  const auto [m, k] = ShapeOf(a, options.transpose_a);
  const ProductKey key(m, c.cols, k, a.stride, b.stride, c.stride, a.dtype, c.dtype, options.transpose_a, options.transpose_b,
                       options.accumulate, options.alpha);
  const auto found = products->find(key);
  if (found != products->end()) return &found->second;
  Product product{DescriptorOf(a, options.transpose_a), DescriptorOf(b, options.transpose_b), DescriptorOf(c, false), {}, {}, {}};
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (options.alpha != 1.0f) attributes.set_output_scales(0, {options.alpha});
  if (options.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc description({product.a, product.b, product.c}, attributes, CpuEngine());
  product.primitive = dnnl::matmul(description);
  product.scratchpad_desc = description.scratchpad_desc();
  product.scratchpad.resize(product.scratchpad_desc.get_size());
  return &products->emplace(key, std::move(product)).first->second;
}

// One caller at a time: primitives and their scratchpads are shared.
void ProductNative(const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  try {
    Product* product = FindProduct(a, b, c, options);
    static auto* stream = new dnnl::stream(CpuEngine());
    product->primitive.execute(*stream,
                               {{DNNL_ARG_SRC, {product->a, CpuEngine(), a.data}},
                                {DNNL_ARG_WEIGHTS, {product->b, CpuEngine(), b.data}},
                                {DNNL_ARG_DST, {product->c, CpuEngine(), c.data}},
                                {DNNL_ARG_SCRATCHPAD, {product->scratchpad_desc, CpuEngine(), product->scratchpad.data()}}});
    stream->wait();
  } catch (const dnnl::error& error) {
    ThrowEngineError("oneDNN bf16 product [{}, {}] x [{}, {}]: {}", a.rows, a.cols, b.rows, b.cols, error.what());
  }
}

// A dense F32 copy in `buffer`; F32 is passed through.
Matrix Widened(const Matrix& x, std::vector<float>* buffer) {
  if (x.dtype == DType::kF32) return x;
  if (static_cast<int64_t>(buffer->size()) < x.rows * x.cols) buffer->resize(x.rows * x.cols);
  const auto widen = [&]<class T>(const T* data) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.rows; ++row) {
      float* out = buffer->data() + row * x.cols;
      for (int64_t col = 0; col < x.cols; ++col) out[col] = ToFloat(data[row * x.stride + col]);
    }
  };
  if (x.dtype == DType::kBF16)
    widen(static_cast<const BFloat16*>(x.data));
  else
    widen(static_cast<const Float16*>(x.data));
  return {buffer->data(), DType::kF32, x.rows, x.cols, x.cols};
}

void ProductWidened(const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  thread_local std::vector<float> a_buffer, b_buffer, c_buffer;  // Grow to the largest product once.
  Matrix out = c;
  if (c.dtype != DType::kF32) {
    if (static_cast<int64_t>(c_buffer.size()) < c.rows * c.cols) c_buffer.resize(c.rows * c.cols);
    out = {c_buffer.data(), DType::kF32, c.rows, c.cols, c.cols};
  }
  ProductF32(Widened(a, &a_buffer), Widened(b, &b_buffer), out, options);
  if (c.dtype == DType::kF32) return;
  const float* values = static_cast<const float*>(out.data);
  const auto narrow = [&]<class T>(T* data) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t col = 0; col < c.cols; ++col) data[row * c.stride + col] = cpu::Narrow<T>(values[row * c.cols + col]);
    }
  };
  if (c.dtype == DType::kBF16)
    narrow(static_cast<BFloat16*>(c.data));
  else
    narrow(static_cast<Float16*>(c.data));
}

void GemmCpu(const Context&, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
  const auto [m, k] = ShapeOf(a, options.transpose_a);
  const auto [k_of_b, n] = ShapeOf(b, options.transpose_b);
  if (k != k_of_b || m != c.rows || n != c.cols) {
    ThrowEngineError("product [{}, {}] x [{}, {}] into [{}, {}]", m, k, k_of_b, n, c.rows, c.cols);
  }
  if (a.dtype != b.dtype) ThrowEngineError("product of {} and {}", NameOf(a.dtype), NameOf(b.dtype));
  if (options.accumulate && c.dtype != DType::kF32) ThrowEngineError("product added to {}: F32 only", NameOf(c.dtype));
  if (m == 0 || n == 0) return;
  if (a.dtype == DType::kF32 && c.dtype == DType::kF32) return ProductF32(a, b, c, options);
  if (a.dtype == DType::kBF16 && c.dtype != DType::kF16 && NativeBF16Products()) return ProductNative(a, b, c, options);
  ProductWidened(a, b, c, options);
}

}  // namespace

Op<void(const Context&, const Matrix&, const Matrix&, const Matrix&, const GemmOptions&)> Gemm{&GemmCpu};

bool NativeBF16Products() {
  static const bool native = [] {
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & needed) == needed;
  }();
  return native;
}

Matrix AsMatrix(const Tensor& tensor) {
  const int rank = tensor.shape.rank();
  const int64_t cols = rank == 0 ? 1 : tensor.shape[rank - 1];
  return {tensor.data, tensor.dtype, cols == 0 ? 0 : tensor.size() / cols, cols, cols};
}

Matrix RowsOf(const Matrix& matrix, int64_t begin, int64_t count) {
  return {static_cast<char*>(matrix.data) + begin * matrix.stride * static_cast<int64_t>(SizeOf(matrix.dtype)), matrix.dtype,
          count, matrix.cols, matrix.stride};
}

Matrix ColumnsOf(const Matrix& matrix, int64_t begin, int64_t count) {
  return {static_cast<char*>(matrix.data) + begin * static_cast<int64_t>(SizeOf(matrix.dtype)), matrix.dtype, matrix.rows, count,
          matrix.stride};
}

}  // namespace mbridge
