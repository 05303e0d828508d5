#include "engine/ops/embedding.h"

#include <algorithm>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/dropout.h"

namespace mbridge {
namespace {

void ForwardCpu(const Context&, const Tensor& tokens, const Tensor& position_ids, const Tensor& words, const Tensor& positions,
                const Tensor& keep, double p, DType precision, const Tensor& y) {
  const int64_t b = tokens.shape[0], s = tokens.shape[1], h = words.shape[1];
  const float scale = DropoutScale(DropoutKind::kEager, p);
  cpu::WithPrecision(words.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const int32_t* ids = tokens.as<int32_t>();
    const int32_t* places = positions.empty() ? nullptr : position_ids.as<int32_t>();
    const T *table = words.as<T>(), *place_table = positions.empty() ? nullptr : positions.as<T>();
    const uint8_t* kept = keep.empty() ? nullptr : keep.as<uint8_t>();
    T* out = y.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s * b; ++row) {
      const int64_t id = row % b * s + row / b;
      const T* word = table + ids[id] * h;
      T* to = out + row * h;
      if (ids[id] < 0) {
        std::fill_n(to, h, T{});
      } else if (places == nullptr) {
        if (to != word) std::copy_n(word, h, to);
      } else {
        const T* place = place_table + places[id] * h;
#pragma omp simd
        for (int64_t j = 0; j < h; ++j) to[j] = P::Store(P::Load(word[j]) + P::Load(place[j]));
      }
      if (kept == nullptr) continue;
      const uint8_t* kept_row = kept + row * h;
#pragma omp simd
      for (int64_t j = 0; j < h; ++j) to[j] = P::Store(P::Load(to[j]) * static_cast<float>(kept_row[j]) * scale);
    }
  });
}

constexpr int64_t kChunk = 32, kMaxChunked = 3072;

// Columns [begin, begin + width) of every id's gradient, in chunks.
template <class P>
void GatherChunks(const int32_t* ids, const int32_t* touched, const typename P::Storage* dy, int64_t b, int64_t s, int64_t h,
                  int64_t begin, int64_t width, float* gathered) {
  constexpr int64_t kMaxWidth = 64;
  for (int64_t first = 0; first < b * s; first += kChunk) {
    const int64_t end = std::min(first + kChunk, b * s);
    for (int64_t i = first; i < end; ++i) {
      const int32_t id = ids[i];
      if (id < 0 || std::find(ids + first, ids + i, id) != ids + i) continue;  // Summed with its first occurrence.
      float sum[kMaxWidth] = {};
      for (int64_t k = i; k < end; ++k) {
        if (ids[k] != id) continue;
        const auto* row = dy + (k % s * b + k / s) * h + begin;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) sum[j] += P::Load(row[j]);
      }
      float* to = gathered + touched[id] * h + begin;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) to[j] = P::Round(to[j] + sum[j]);
    }
  }
}

// The same for many ids.
template <class P>
void GatherAll(const int32_t* ids, const int32_t* touched, const typename P::Storage* dy, int64_t b, int64_t s, int64_t h,
               int64_t begin, int64_t width, int64_t slots, float* gathered) {
  for (int64_t k = 0; k < b * s; ++k) {
    if (ids[k] < 0) continue;
    const auto* row = dy + (k % s * b + k / s) * h + begin;
    float* to = gathered + touched[ids[k]] * h + begin;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) to[j] += P::Load(row[j]);
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    float* to = gathered + slot * h + begin;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) to[j] = P::Round(to[j]);
  }
}

void BackwardCpu(const Context&, const Tensor& ids, const Tensor& dy, DType precision, EmbeddingSum sum, const Tensor& grad,
                 const Tensor& touched, const Tensor& gathered) {
  constexpr int64_t kBlock = 64;
  const int64_t b = ids.shape[0], s = ids.shape[1], h = grad.shape[1], blocks = (h + kBlock - 1) / kBlock;
  const int32_t* id = ids.as<int32_t>();
  int32_t* slot = touched.as<int32_t>();
  float* sums = gathered.as<float>();
  int32_t slots = 0;
  for (int64_t i = 0; i < b * s; ++i) {
    if (id[i] >= 0 && slot[id[i]] < 0) slot[id[i]] = slots++;
  }
  std::fill_n(sums, slots * h, 0.0f);
  cpu::WithPrecision(dy.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T* g = dy.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock, width = std::min(kBlock, h - begin);
      if (b * s <= kMaxChunked) {
        GatherChunks<P>(id, slot, g, b, s, h, begin, width, sums);
      } else {
        GatherAll<P>(id, slot, g, b, s, h, begin, width, slots, sums);
      }
    }
    float* out = grad.as<float>();
    for (int64_t i = 0; i < b * s; ++i) {
      if (id[i] < 0 || slot[id[i]] < 0) continue;
      float* to = out + id[i] * h;
      const float* from = sums + slot[id[i]] * h;
      if (sum == EmbeddingSum::kTiedGradient) {
#pragma omp simd
        for (int64_t j = 0; j < h; ++j) to[j] = P::Round(P::Round(to[j]) + from[j]);
      } else {
#pragma omp simd
        for (int64_t j = 0; j < h; ++j) to[j] += from[j];
      }
      slot[id[i]] = -1;
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, DType, const Tensor&)>
    EmbeddingForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, DType, EmbeddingSum, const Tensor&, const Tensor&, const Tensor&)>
    EmbeddingBackward{&BackwardCpu};

}  // namespace mbridge
