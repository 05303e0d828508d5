#include "engine/ops/attention.h"

#include "engine/ops/cuda/attention_workspace.h"
#include "engine/ops/cuda/cublas_gemm.h"
#include "engine/ops/cuda/launch.h"
#include "engine/ops/cuda/sink_gradients.h"
#include "engine/ops/dropout.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge::cuda {
namespace {

constexpr int kThreads = 256;

// The heads of one launch: n in [first, first + gridDim.y), the j-th of each group.
struct Heads {
  int64_t first, per_group, j;
  __device__ int64_t Plane(int64_t n) const { return (first + n) * per_group + j; }
};

// Attention sinks: a score of each of `count` heads, and what stands in AttentionSinks::probabilities.
template <class T> struct Sinks {
  const T* scores;  // Null: none.
  float* rows;
  int64_t count;
};
template <class T> Sinks<T> SinksOf(const AttentionOptions& o, bool keep_rows) {
  const Tensor& scores = o.sinks.scores;
  if (scores.empty()) return {nullptr, nullptr, 1};
  return {static_cast<const T*>(scores.data), keep_rows ? o.sinks.probabilities.as<float>() : nullptr, o.heads};
}

// What the kernels share of the options.
struct Rows {
  int64_t s, stride, window;
  __device__ int64_t FirstKey(int64_t query) const { return window > 0 && query + 1 > window ? query + 1 - window : 0; }
};

template <class T> __device__ __forceinline__ float Dropped(float probability, const uint8_t* keep, int64_t j, float scale) {
  const float rounded = Round<T>(probability);
  return keep == nullptr ? rounded : Round<T>(rounded * static_cast<float>(keep[j]) * scale);
}

// One block for each query (x) of each head (y): scores become dropped probabilities in place, zero where masked. With a soft cap
// the scores are made of `uncapped` first.
template <class T, class Saved>
__global__ void SoftmaxForward(T* scores, const float* uncapped, float cap, Saved* probabilities, const uint8_t* keep,
                               float keep_scale, Sinks<T> sinks, Rows rows, Heads heads) {
  __shared__ float shared[32];
  const int64_t query = blockIdx.x, plane = heads.Plane(blockIdx.y) * rows.s * rows.s + query * rows.s;
  const int64_t begin = rows.FirstKey(query), at = (blockIdx.y * rows.s + query) * rows.stride;
  T* row = scores + at;
  if (cap > 0.0f) {
    const float inverse = 1.0f / cap;
    for (int64_t j = threadIdx.x; j < rows.s; j += blockDim.x) row[j] = Narrow<T>(cap * tanhf(uncapped[at + j] * inverse));
    __syncthreads();
  }
  const int64_t head = heads.Plane(blockIdx.y);
  const float sink = sinks.scores == nullptr ? -INFINITY : Widen(sinks.scores[head % sinks.count]);
  float largest = sink;
  for (int64_t j = begin + threadIdx.x; j <= query; j += blockDim.x) largest = fmaxf(largest, Widen(row[j]));
  largest = BlockMax(largest, shared);
  float sum = 0.0f;
  for (int64_t j = begin + threadIdx.x; j <= query; j += blockDim.x) sum += expf(Widen(row[j]) - largest);
  const float of_sink = sinks.scores == nullptr ? 0.0f : expf(sink - largest);
  const float inverse = 1.0f / (BlockSum(sum, shared) + of_sink);
  if (sinks.rows != nullptr && threadIdx.x == 0) sinks.rows[head * rows.s + query] = of_sink * inverse;
  for (int64_t j = threadIdx.x; j < rows.s; j += blockDim.x) {
    if (j < begin || j > query) {
      row[j] = Narrow<T>(0.0f);
      continue;
    }
    const float probability = expf(Widen(row[j]) - largest) * inverse;
    if (probabilities != nullptr) probabilities[plane + j] = Narrow<Saved>(probability);
    row[j] = Narrow<T>(Dropped<T>(probability, keep == nullptr ? nullptr : keep + plane, j, keep_scale));
  }
}

// One block as above: dD becomes dS in place, `dropped` gets D; both zero where masked.
template <class T, class Saved, bool kRoundProduct>
__global__ void SoftmaxBackward(T* grads, T* dropped, const Saved* probabilities, const uint8_t* keep, float keep_scale,
                                Sinks<T> sinks, Rows rows, Heads heads) {
  __shared__ float shared[32];
  const int64_t query = blockIdx.x, plane = heads.Plane(blockIdx.y) * rows.s * rows.s + query * rows.s;
  const int64_t begin = rows.FirstKey(query), at = (blockIdx.y * rows.s + query) * rows.stride;
  T* row = grads + at;
  const Saved* probability = probabilities + plane;
  const uint8_t* kept = keep == nullptr ? nullptr : keep + plane;
  const auto product = [&](int64_t j) {
    const float value = Widen(probability[j]) * Dropped<T>(Widen(row[j]), kept, j, keep_scale);
    return kRoundProduct ? Round<T>(value) : value;
  };
  float sum = 0.0f;
  for (int64_t j = begin + threadIdx.x; j <= query; j += blockDim.x) sum += product(j);
  sum = BlockSum(sum, shared);
  if (sinks.rows != nullptr && threadIdx.x == 0) sinks.rows[heads.Plane(blockIdx.y) * rows.s + query] *= -sum;
  for (int64_t j = threadIdx.x; j < rows.s; j += blockDim.x) {
    const bool seen = j >= begin && j <= query;
    dropped[at + j] = Narrow<T>(seen ? Dropped<T>(Widen(probability[j]), kept, j, keep_scale) : 0.0f);
    row[j] = Narrow<T>(seen ? product(j) - Widen(probability[j]) * sum : 0.0f);
  }
}

// grads = round(grads (1 - tanh(uncapped / cap)^2)) for `count` of each.
template <class T> __global__ void SoftCapBackward(T* grads, const float* uncapped, float cap, int64_t count) {
  const float inverse = 1.0f / cap;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float t = tanhf(uncapped[i] * inverse);
    grads[i] = Narrow<T>(Widen(grads[i]) * (1.0f - t * t));
  }
}

// d_qkv of unscaled products to its final values: queries are scaled; keys are scaled, and with values summed over the heads of
// their group, which stand in key_grads [n, j, s, d] and value_grads [n, j, s, v] unless there is only one.
template <class T>
__global__ void FinishGradients(T* d_qkv, const T* key_grads, const T* value_grads, int64_t s, int64_t batch, int64_t groups,
                                int64_t per_group, int64_t d, int64_t v, float scale) {
  const int64_t width = (per_group + 1) * d + v, count = s * batch * groups * width;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t column = i % width, n = i / width % (batch * groups), token = i / (width * batch * groups);
    const bool is_value = column >= (per_group + 1) * d;
    if (column < per_group * d || per_group == 1) {
      if (!is_value) d_qkv[i] = Narrow<T>(Widen(d_qkv[i]) * scale);
      continue;
    }
    const int64_t size = is_value ? v : d, channel = column - (is_value ? (per_group + 1) * d : per_group * d);
    const T* grads = (is_value ? value_grads : key_grads) + (n * per_group * s + token) * size + channel;
    float sum = 0.0f;
    for (int64_t j = 0; j < per_group; ++j) {
      const float grad = Widen(grads[j * s * size]);
      sum += is_value ? grad : Round<T>(grad * scale);
    }
    d_qkv[i] = Narrow<T>(sum);
  }
}

// Where products find and leave the heads of a chunk.
class Slices {
 public:
  Slices(const AttentionOptions& o, DType storage)
      : s_(o.seq_length),
        d_(o.head_size),
        v_(o.value_width()),
        batch_(o.batch),
        heads_(o.heads),
        per_group_(o.heads / o.groups),
        storage_(storage),
        layout_{o.heads, o.groups, o.head_size, o.value_size} {}

  // Slot `slot` (query j, key or value) of group n in a tensor laid out as qkv. One stride leads from group to group, also from
  // the last of a sample to the first of the next.
  Matrix InQkv(const Tensor& qkv, int64_t n, int64_t slot) const {
    return At(qkv.data, n * qkv_stride() + slot * d_, SizeOfSlot(slot), batch_ * layout_.width());
  }
  Matrix InContext(const Tensor& context, int64_t n, int64_t j) const {
    return At(context.data, n * context_stride() + j * v_, v_, batch_ * heads_ * v_);
  }
  // Of keys or values, by slot.
  Matrix InHeadGrads(void* grads, int64_t n, int64_t j, int64_t slot) const {
    const int64_t size = SizeOfSlot(slot);
    return At(grads, (n * per_group_ + j) * s_ * size, size, size);
  }
  int64_t qkv_stride() const { return layout_.group_width(); }
  int64_t context_stride() const { return per_group_ * v_; }
  int64_t head_grad_stride(int64_t slot) const { return per_group_ * s_ * SizeOfSlot(slot); }

 private:
  int64_t SizeOfSlot(int64_t slot) const { return slot == per_group_ + 1 ? v_ : d_; }
  Matrix At(void* data, int64_t offset, int64_t size, int64_t stride) const {
    return {static_cast<char*>(data) + offset * static_cast<int64_t>(SizeOf(storage_)), storage_, s_, size, stride};
  }
  int64_t s_, d_, v_, batch_, heads_, per_group_;
  DType storage_;
  QkvLayout layout_;
};

// What lies in the workspace tensor.
struct Buffers {
  void *scores, *dropped, *key_grads, *value_grads;
  float* uncapped;
  Buffers(const AttentionWorkspace& w, const AttentionOptions& o, DType storage, const Tensor& workspace) {
    if (static_cast<int64_t>(workspace.bytes()) < w.bytes()) {
      ThrowEngineError("attention workspace of {} bytes, {} needed", workspace.bytes(), w.bytes());
    }
    if (o.precision != storage) ThrowEngineError("CUDA attention of {} in {}", NameOf(storage), NameOf(o.precision));
    uncapped = static_cast<float*>(workspace.data);
    scores = uncapped + w.uncapped;
    dropped = static_cast<char*>(scores) + w.scores * w.element_size;
    key_grads = static_cast<char*>(dropped) + w.scores * w.element_size;
    value_grads = static_cast<char*>(key_grads) + w.head_grads * w.element_size;
  }
};

// f(first, count, j) for every chunk of heads.
template <class F> void ForChunks(const AttentionOptions& o, const AttentionWorkspace& w, F&& f) {
  const int64_t count = o.batch * o.groups;
  for (int64_t first = 0; first < count; first += w.chunk) {
    for (int64_t j = 0; j < o.heads / o.groups; ++j) f(first, std::min(w.chunk, count - first), j);
  }
}

void AttentionForwardCuda(const Context& context, const Tensor& qkv, const Tensor& keep, const AttentionOptions& o,
                          const Tensor& probabilities, const Tensor& output, const Tensor& workspace) {
  const DType storage = qkv.dtype;
  const AttentionWorkspace w(o, storage);
  const Buffers buffers(w, o, storage, workspace);
  const Slices slices(o, storage);
  const int64_t s = o.seq_length, per_group = o.heads / o.groups;
  const float keep_scale = DropoutScale(DropoutKind::kEager, o.dropout);
  const uint8_t* kept = keep.empty() ? nullptr : keep.as<uint8_t>();
  const Matrix scores{buffers.scores, storage, s, s, w.stride}, uncapped{buffers.uncapped, DType::kF32, s, s, w.stride};
  ForChunks(o, w, [&](int64_t first, int64_t count, int64_t j) {
    GemmBatch batch{static_cast<int>(count), slices.qkv_stride(), slices.qkv_stride(), s * w.stride};
    CublasGemm(context, slices.InQkv(qkv, first, j), slices.InQkv(qkv, first, per_group), o.soft_cap > 0.0f ? uncapped : scores,
               {.transpose_b = true, .alpha = o.scale}, batch);
    const dim3 grid(static_cast<unsigned>(s), static_cast<unsigned>(count));
    WithType(storage, [&]<class T>(T) {
      const auto launch = [&]<class Saved>(Saved) {
        SoftmaxForward<<<grid, kThreads, 0, StreamOf(context)>>>(
            static_cast<T*>(buffers.scores), buffers.uncapped, o.soft_cap, static_cast<Saved*>(probabilities.data), kept,
            keep_scale, SinksOf<T>(o, !probabilities.empty()), Rows{s, w.stride, o.window}, Heads{first, per_group, j});
      };
      o.softmax_in_fp32 ? launch(float()) : launch(T());
    });
    MB_CUDA_LAUNCHED();
    batch = {static_cast<int>(count), s * w.stride, slices.qkv_stride(), slices.context_stride()};
    CublasGemm(context, scores, slices.InQkv(qkv, first, per_group + 1), slices.InContext(output, first, j), {}, batch);
  });
}

void AttentionBackwardCuda(const Context& context, const Tensor& d_context, const Tensor& qkv, const Tensor& keep,
                           const Tensor& probabilities, const AttentionOptions& o, const Tensor& d_qkv, const Tensor& workspace) {
  const DType storage = qkv.dtype;
  const AttentionWorkspace w(o, storage);
  const Buffers buffers(w, o, storage, workspace);
  const Slices slices(o, storage);
  const int64_t s = o.seq_length, per_group = o.heads / o.groups, plane = s * w.stride;
  const float keep_scale = DropoutScale(DropoutKind::kEager, o.dropout);
  const uint8_t* kept = keep.empty() ? nullptr : keep.as<uint8_t>();
  const Matrix grads{buffers.scores, storage, s, s, w.stride}, dropped{buffers.dropped, storage, s, s, w.stride};
  const Matrix uncapped{buffers.uncapped, DType::kF32, s, s, w.stride};
  ForChunks(o, w, [&](int64_t first, int64_t chunk, int64_t j) {
    const int count = static_cast<int>(chunk);
    const Matrix d_output = slices.InContext(d_context, first, j);
    CublasGemm(context, d_output, slices.InQkv(qkv, first, per_group + 1), grads, {.transpose_b = true},
               {count, slices.context_stride(), slices.qkv_stride(), plane});
    const dim3 grid(static_cast<unsigned>(s), static_cast<unsigned>(count));
    WithType(storage, [&]<class T>(T) {
      const auto launch = [&]<class Saved, bool kRound>(Saved, std::bool_constant<kRound>) {
        SoftmaxBackward<T, Saved, kRound><<<grid, kThreads, 0, StreamOf(context)>>>(
            static_cast<T*>(buffers.scores), static_cast<T*>(buffers.dropped), static_cast<const Saved*>(probabilities.data),
            kept, keep_scale, SinksOf<T>(o, true), Rows{s, w.stride, o.window}, Heads{first, per_group, j});
      };
      o.softmax_in_fp32 ? launch(float(), std::false_type()) : launch(T(), std::true_type());
    });
    MB_CUDA_LAUNCHED();
    const bool direct = per_group == 1;
    const auto to = [&](void* head_grads, int64_t slot) {
      return direct ? slices.InQkv(d_qkv, first, slot) : slices.InHeadGrads(head_grads, first, j, slot);
    };
    const auto to_stride = [&](int64_t slot) { return direct ? slices.qkv_stride() : slices.head_grad_stride(slot); };
    CublasGemm(context, dropped, d_output, to(buffers.value_grads, per_group + 1), {.transpose_a = true},
               {count, plane, slices.context_stride(), to_stride(per_group + 1)});
    if (o.soft_cap > 0.0f) {
      CublasGemm(context, slices.InQkv(qkv, first, j), slices.InQkv(qkv, first, per_group), uncapped,
                 {.transpose_b = true, .alpha = o.scale}, {count, slices.qkv_stride(), slices.qkv_stride(), plane});
      WithType(storage, [&]<class T>(T) {
        SoftCapBackward<<<GridOf(count * plane, kThreads), kThreads, 0, StreamOf(context)>>>(
            static_cast<T*>(buffers.scores), buffers.uncapped, o.soft_cap, count * plane);
      });
      MB_CUDA_LAUNCHED();
    }
    CublasGemm(context, grads, slices.InQkv(qkv, first, j), to(buffers.key_grads, per_group), {.transpose_a = true},
               {count, plane, slices.qkv_stride(), to_stride(per_group)});
    CublasGemm(context, grads, slices.InQkv(qkv, first, per_group), slices.InQkv(d_qkv, first, j), {},
               {count, plane, slices.qkv_stride(), slices.qkv_stride()});
  });
  WithType(storage, [&]<class T>(T) {
    FinishGradients<<<GridOf(d_qkv.size(), kThreads), kThreads, 0, StreamOf(context)>>>(
        static_cast<T*>(d_qkv.data), static_cast<const T*>(buffers.key_grads), static_cast<const T*>(buffers.value_grads), s,
        o.batch, o.groups, per_group, o.head_size, o.value_width(), o.scale);
    MB_CUDA_LAUNCHED();
    if (!o.sinks.scores.empty()) AddSinkGradients<T>(context, o.sinks, o.batch, s);
  });
}

const bool g_registered = (AttentionForward.cuda = &AttentionForwardCuda, AttentionBackward.cuda = &AttentionBackwardCuda, true);

}  // namespace
}  // namespace mbridge::cuda
