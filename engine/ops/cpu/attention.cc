#include "engine/ops/attention.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <type_traits>
#include <utility>

#include <omp.h>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"
#include "engine/ops/cuda/attention_workspace.h"
#include "engine/ops/dropout.h"
#include "engine/ops/gemm.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge {
namespace {

// Queries are taken in blocks of this many rows; a block sees the keys up to its end, which skips most of what the mask hides.
constexpr int64_t kBlockRows = 128;
// Rows of scratch matrices are not a power of two apart, to spread over the cache's sets.
constexpr int64_t kRowPadding = 16;

constexpr float kNoSink = -std::numeric_limits<float>::infinity();

int64_t ScoreStride(const AttentionOptions& o) { return o.seq_length + kRowPadding; }

// F32 scratch of one thread.
struct Scratch {
  float *scores, *dropped;                   // [kBlockRows, ScoreStride].
  float *key_grad, *value_grad;              // [s, d] (values and context: [s, value size]) of one head.
  float *group_key_grad, *group_value_grad;  // Summed over the heads of a group.
  float *query, *key, *value, *context;      // Widened copies, used if storage is narrow.
  int64_t floats;

  Scratch(const AttentionOptions& o, DType storage, float* base) {
    // `dropped` also takes products with queries or values, which are wider than the scores of a short sequence.
    const int64_t widest = std::max({ScoreStride(o), o.head_size, o.value_width()});
    const int64_t block = std::min(kBlockRows, o.seq_length) * widest, head = o.seq_length * o.head_size;
    const int64_t values = o.seq_length * o.value_width();
    const bool copy = storage != DType::kF32;
    float* at = base;
    const auto take = [&at](int64_t count) { return std::exchange(at, at + (count + 15) / 16 * 16); };
    scores = take(block), dropped = take(block);
    key_grad = take(head), value_grad = take(values), group_key_grad = take(head), group_value_grad = take(values);
    query = take(copy ? head : 0), key = take(copy ? head : 0), value = take(copy ? values : 0),
    context = take(copy ? values : 0);
    floats = at - base;
  }
};

Matrix Window(float* data, int64_t rows, int64_t cols, int64_t stride) { return {data, DType::kF32, rows, cols, stride}; }

// A head's [s, size] slice of a [s, b, width] tensor as F32: in place if it is F32, else copied to `copy`.
template <class P>
Matrix HeadSlice(const Tensor& tensor, const AttentionOptions& o, int64_t batch, int64_t column, int64_t size, float* copy) {
  const int64_t width = tensor.shape[2], stride = o.batch * width;
  auto* data = tensor.as<typename P::Storage>() + batch * width + column;
  if constexpr (std::is_same_v<typename P::Storage, float>) {
    return Window(data, o.seq_length, size, stride);
  } else {
    for (int64_t i = 0; i < o.seq_length; ++i) {
      for (int64_t j = 0; j < size; ++j) copy[i * size + j] = P::Load(data[i * stride + j]);
    }
    return Window(copy, o.seq_length, size, size);
  }
}

// to[i, j] = round(from[i, j]) then, if scale is not 1, round(that * scale).
template <class P>
void StoreSlice(const Matrix& from, int64_t first_row, const Tensor& to, const AttentionOptions& o, int64_t batch, int64_t column,
                float scale) {
  const int64_t width = to.shape[2], stride = o.batch * width;
  auto* out = to.as<typename P::Storage>() + batch * width + column + first_row * stride;
  const float* in = static_cast<const float*>(from.data);
  for (int64_t i = 0; i < from.rows; ++i) {
    auto* row = out + i * stride;
#pragma omp simd
    for (int64_t j = 0; j < from.cols; ++j) row[j] = P::Store(P::Round(in[i * from.stride + j]) * scale);
  }
}

// First key that a query sees.
int64_t FirstKey(const AttentionOptions& o, int64_t query) {
  return o.window > 0 ? std::max<int64_t>(0, query + 1 - o.window) : 0;
}

struct Columns {
  int64_t query, key, value;  // First column of the head inside qkv.
};

Columns ColumnsOfHead(const AttentionOptions& o, int64_t head) {
  const QkvLayout layout{o.heads, o.groups, o.head_size, o.value_size};
  const int64_t group = head / layout.heads_per_group();
  return {layout.query_column(head), layout.key_column(group), layout.value_column(group)};
}

// Softmax of row[0 .. count) rounded to P on read, and of a sink's score; F32 probabilities in place. The sink's probability.
template <class P> float SoftmaxRow(float* row, int64_t count, float sink) {
  float largest = sink;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) {
    row[j] = P::Round(row[j]);
    largest = std::max(largest, row[j]);
  }
  const float of_sink = sink == kNoSink ? 0.0f : cpu::Exp(sink - largest);
  float sum = of_sink;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) {
    row[j] = cpu::Exp(row[j] - largest);
    sum += row[j];
  }
  const float inverse = 1.0f / sum;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) row[j] *= inverse;
  return of_sink * inverse;
}

// row[j] = cap tanh(row[j] / cap).
void SoftCapRow(float* row, float cap, int64_t count) {
  const float inverse = 1.0f / cap;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) row[j] = cap * cpu::Tanh(row[j] * inverse);
}

// grad[j] = round(grad[j] (1 - tanh(score[j] / cap)^2)).
template <class P> void SoftCapBackwardRow(const float* score, float cap, int64_t count, float* grad) {
  const float inverse = 1.0f / cap;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    const float t = cpu::Tanh(score[j] * inverse);
    grad[j] = P::Round(grad[j] * (1.0f - t * t));
  }
}

// dropped[j] = round(round(probability) keep scale).
template <class P, class Saved>
void DropRow(const Saved* probability, const uint8_t* keep, float scale, int64_t count, float* dropped) {
  if (keep == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) dropped[j] = P::Round(ToFloat(probability[j]));
  } else {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j)
      dropped[j] = P::Round(P::Round(ToFloat(probability[j])) * static_cast<float>(keep[j]) * scale);
  }
}

template <class P, class Saved>
void ForwardHead(const Context& context, const Tensor& qkv, const Tensor& keep, const AttentionOptions& o,
                 const Tensor& probabilities, const Tensor& output, int64_t batch, int64_t head, const Scratch& scratch) {
  const int64_t s = o.seq_length, stride = ScoreStride(o);
  const Columns columns = ColumnsOfHead(o, head);
  const Matrix query = HeadSlice<P>(qkv, o, batch, columns.query, o.head_size, scratch.query);
  const Matrix key = HeadSlice<P>(qkv, o, batch, columns.key, o.head_size, scratch.key);
  const Matrix value = HeadSlice<P>(qkv, o, batch, columns.value, o.value_width(), scratch.value);
  const bool sinks = !o.sinks.scores.empty();
  const float sink = sinks ? P::Load(o.sinks.scores.as<typename P::Storage>()[head]) : kNoSink;
  const float scale = DropoutScale(DropoutKind::kEager, o.dropout);
  const int64_t plane = (batch * o.heads + head) * s * s;
  for (int64_t first = 0; first < s; first += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, s - first), keys = first + rows;
    const Matrix scores = Window(scratch.scores, rows, keys, stride);
    Gemm(context, RowsOf(query, first, rows), RowsOf(key, 0, keys), scores, {.transpose_b = true, .alpha = o.scale});
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t begin = FirstKey(o, first + i), seen = first + i + 1 - begin, at = plane + (first + i) * s + begin;
      float *whole_row = scratch.scores + i * stride, *row = whole_row + begin;
      if (o.soft_cap > 0.0f) SoftCapRow(row, o.soft_cap, seen);
      const float of_sink = SoftmaxRow<P>(row, seen, sink);
      if (!probabilities.empty()) {
        if (sinks) o.sinks.probabilities.as<float>()[(batch * o.heads + head) * s + first + i] = of_sink;
        Saved* saved = probabilities.as<Saved>() + at;
#pragma omp simd
        for (int64_t j = 0; j < seen; ++j) saved[j] = cpu::Narrow<Saved>(row[j]);
      }
      DropRow<P>(row, keep.empty() ? nullptr : keep.as<uint8_t>() + at, scale, seen, row);
      std::fill(whole_row, row, 0.0f);
      std::fill(row + seen, whole_row + keys, 0.0f);
    }
    const Matrix out = Window(scratch.dropped, rows, o.value_width(), o.value_width());
    Gemm(context, scores, RowsOf(value, 0, keys), out, {});
    StoreSlice<P>(out, first, output, o, batch, head * o.value_width(), 1.0f);
  }
}

// In: row of dD. Out: row of dS. dropped[j] gets D. Returns the sum of P dP.
template <class P, class Saved>
float SoftmaxBackwardRow(const Saved* probability, const uint8_t* keep, float scale, bool round_product, int64_t seen, float* row,
                         float* dropped) {
  DropRow<P>(probability, keep, scale, seen, dropped);
  float sum = 0.0f;
  if (keep == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < seen; ++j) row[j] = P::Round(row[j]);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < seen; ++j) row[j] = P::Round(P::Round(row[j]) * static_cast<float>(keep[j]) * scale);
  }
  if (round_product) {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; ++j) {
      row[j] = P::Round(ToFloat(probability[j]) * row[j]);
      sum += row[j];
    }
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; ++j) {
      row[j] = ToFloat(probability[j]) * row[j];
      sum += row[j];
    }
  }
#pragma omp simd
  for (int64_t j = 0; j < seen; ++j) row[j] = P::Round(row[j] - ToFloat(probability[j]) * sum);
  return sum;
}

// group_sum += round(round(grad) scale).
template <class P> void AddHeadGradient(const float* grad, float scale, int64_t count, float* group_sum) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) group_sum[i] += P::Round(P::Round(grad[i]) * scale);
}

template <class P, class Saved>
void BackwardGroup(const Context& context, const Tensor& d_context, const Tensor& qkv, const Tensor& keep,
                   const Tensor& probabilities, const AttentionOptions& o, const Tensor& d_qkv, int64_t batch, int64_t group,
                   const Scratch& scratch) {
  const int64_t s = o.seq_length, d = o.head_size, v = o.value_width(), stride = ScoreStride(o), per_group = o.heads / o.groups;
  const float scale = DropoutScale(DropoutKind::kEager, o.dropout);
  std::fill_n(scratch.group_key_grad, s * d, 0.0f);
  std::fill_n(scratch.group_value_grad, s * v, 0.0f);
  const Columns shared = ColumnsOfHead(o, group * per_group);
  const Matrix key = HeadSlice<P>(qkv, o, batch, shared.key, d, scratch.key);
  const Matrix value = HeadSlice<P>(qkv, o, batch, shared.value, v, scratch.value);
  for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
    const Columns columns = ColumnsOfHead(o, head);
    const Matrix query = HeadSlice<P>(qkv, o, batch, columns.query, d, scratch.query);
    const Matrix grad = HeadSlice<P>(d_context, o, batch, head * v, v, scratch.context);
    const int64_t plane = (batch * o.heads + head) * s * s;
    // From the last block, which sees every key: it starts the sums of the key and value gradients.
    const int64_t last = (s - 1) / kBlockRows * kBlockRows;
    for (int64_t first = last; first >= 0; first -= kBlockRows) {
      const int64_t rows = std::min(kBlockRows, s - first), keys = first + rows;
      const Matrix scores = Window(scratch.scores, rows, keys, stride), dropped = Window(scratch.dropped, rows, keys, stride);
      const Matrix grad_rows = RowsOf(grad, first, rows), query_rows = RowsOf(query, first, rows);
      Gemm(context, grad_rows, RowsOf(value, 0, keys), scores, {.transpose_b = true});
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t begin = FirstKey(o, first + i), seen = first + i + 1 - begin, at = plane + (first + i) * s + begin;
        float *row = scratch.scores + i * stride, *dropped_row = scratch.dropped + i * stride;
        const float sum = SoftmaxBackwardRow<P>(probabilities.as<Saved>() + at, keep.empty() ? nullptr : keep.as<uint8_t>() + at,
                                                scale, !o.softmax_in_fp32, seen, row + begin, dropped_row + begin);
        if (!o.sinks.scores.empty()) o.sinks.probabilities.as<float>()[(batch * o.heads + head) * s + first + i] *= -sum;
        for (float* values : {row, dropped_row}) {
          std::fill(values, values + begin, 0.0f);
          std::fill(values + begin + seen, values + keys, 0.0f);
        }
      }
      const bool add = first != last;
      Gemm(context, dropped, grad_rows, Window(scratch.value_grad, keys, v, v), {.transpose_a = true, .accumulate = add});
      if (o.soft_cap > 0.0f) {  // D is not needed any more: its place takes the scores.
        Gemm(context, query_rows, RowsOf(key, 0, keys), dropped, {.transpose_b = true, .alpha = o.scale});
        for (int64_t i = 0; i < rows; ++i)
          SoftCapBackwardRow<P>(scratch.dropped + i * stride, o.soft_cap, keys, scratch.scores + i * stride);
      }
      Gemm(context, scores, query_rows, Window(scratch.key_grad, keys, d, d), {.transpose_a = true, .accumulate = add});
      const Matrix query_grad = Window(scratch.dropped, rows, d, d);
      Gemm(context, scores, RowsOf(key, 0, keys), query_grad, {});
      StoreSlice<P>(query_grad, first, d_qkv, o, batch, columns.query, o.scale);
    }
    AddHeadGradient<P>(scratch.key_grad, o.scale, s * d, scratch.group_key_grad);
    AddHeadGradient<P>(scratch.value_grad, 1.0f, s * v, scratch.group_value_grad);
  }
  StoreSlice<P>(Window(scratch.group_key_grad, s, d, d), 0, d_qkv, o, batch, shared.key, 1.0f);
  StoreSlice<P>(Window(scratch.group_value_grad, s, v, v), 0, d_qkv, o, batch, shared.value, 1.0f);
}

// gradient[head] += round(sum over batch and rows of what the rows have left).
template <class P> void AddSinkGradients(const AttentionOptions& o) {
  const float* of_rows = o.sinks.probabilities.as<float>();
  for (int64_t head = 0; head < o.heads; ++head) {
    float sum = 0.0f;
    for (int64_t batch = 0; batch < o.batch; ++batch) {
      const float* rows = of_rows + (batch * o.heads + head) * o.seq_length;
      for (int64_t i = 0; i < o.seq_length; ++i) sum += rows[i];
    }
    o.sinks.gradient.as<float>()[head] += P::Round(sum);
  }
}

// Runs body(index, scratch) for each index on the team's threads; the first exception is thrown again afterwards.
template <class Body>
void ParallelWithScratch(int64_t count, const AttentionOptions& o, DType storage, const Tensor& workspace, Body&& body) {
  const int64_t bytes = AttentionWorkspaceBytes(o, storage, omp_get_max_threads());
  if (static_cast<int64_t>(workspace.bytes()) < bytes)
    ThrowEngineError("attention workspace of {} bytes, {} needed", workspace.bytes(), bytes);
  const int64_t floats = Scratch(o, storage, nullptr).floats;
  std::atomic<bool> failed = false;
  std::exception_ptr failure;
#pragma omp parallel for schedule(static)
  for (int64_t index = 0; index < count; ++index) {
    try {
      body(index, Scratch(o, storage, static_cast<float*>(workspace.data) + omp_get_thread_num() * floats));
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failure);
}

// f(P, Saved).
template <class F> void WithTypes(DType storage, const AttentionOptions& o, F&& f) {
  cpu::WithPrecision(storage, o.precision, [&]<class P>(P) {
    using Compact = typename cpu::CompactOf<P::kPrecision>::Type;
    if (o.softmax_in_fp32)  // NOLINT(bugprone-branch-clone): the types differ.
      f(P(), float());
    else
      f(P(), Compact());
  });
}

void ForwardCpu(const Context& context, const Tensor& qkv, const Tensor& keep, const AttentionOptions& o,
                const Tensor& probabilities, const Tensor& output, const Tensor& workspace) {
  WithTypes(qkv.dtype, o, [&]<class P, class Saved>(P, Saved) {
    ParallelWithScratch(o.batch * o.heads, o, qkv.dtype, workspace, [&](int64_t index, const Scratch& scratch) {
      ForwardHead<P, Saved>(context, qkv, keep, o, probabilities, output, index / o.heads, index % o.heads, scratch);
    });
  });
}

void BackwardCpu(const Context& context, const Tensor& d_context, const Tensor& qkv, const Tensor& keep,
                 const Tensor& probabilities, const AttentionOptions& o, const Tensor& d_qkv, const Tensor& workspace) {
  WithTypes(qkv.dtype, o, [&]<class P, class Saved>(P, Saved) {
    ParallelWithScratch(o.batch * o.groups, o, qkv.dtype, workspace, [&](int64_t index, const Scratch& scratch) {
      BackwardGroup<P, Saved>(context, d_context, qkv, keep, probabilities, o, d_qkv, index / o.groups, index % o.groups,
                              scratch);
    });
    if (!o.sinks.scores.empty()) AddSinkGradients<P>(o);
  });
}

}  // namespace

int64_t AttentionWorkspaceBytes(const AttentionOptions& options, DType storage, int threads, DeviceType device) {
  if (device == DeviceType::kCuda) return cuda::AttentionWorkspace(options, storage).bytes();
  return threads * Scratch(options, storage, nullptr).floats * static_cast<int64_t>(sizeof(float));
}

Op<void(const Context&, const Tensor&, const Tensor&, const AttentionOptions&, const Tensor&, const Tensor&, const Tensor&)>
    AttentionForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&, const Tensor&,
        const Tensor&)>
    AttentionBackward{&BackwardCpu};

}  // namespace mbridge
