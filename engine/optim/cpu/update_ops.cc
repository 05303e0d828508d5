#include "engine/optim/update_ops.h"

#include <algorithm>
#include <bit>

namespace mbridge {
namespace {

// In eight fixed lanes.
template <class T> double SquaresOf(const T* x, int64_t count, float scale) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const double value = static_cast<double>(ToFloat(x[i + lane]) * scale);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    const double value = static_cast<double>(ToFloat(x[i]) * scale);
    lanes[i % 8] += value * value;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

template <class T> void Squares(const T* x, int64_t origin, const PieceList& list, float scale, double* out) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < list.count; ++i) out[i] = SquaresOf(x + (list.pieces[i].begin - origin), list.pieces[i].count, scale);
}

void SumOfSquaresCpu(const Context&, const Tensor& data, int64_t origin, const PieceList& list, float scale, const Tensor& sums) {
  double* out = sums.as<double>();
  switch (data.dtype) {
    case DType::kBF16: return Squares(data.as<BFloat16>(), origin, list, scale, out);
    case DType::kF16: return Squares(data.as<Float16>(), origin, list, scale, out);
    default: return Squares(data.as<float>(), origin, list, scale, out);
  }
}

void SumByParameterCpu(const Context&, const Tensor& sums, const Tensor& firsts, const Tensor& totals) {
  const double* in = sums.as<double>();
  const int64_t* first = firsts.as<int64_t>();
  double* out = totals.as<double>();
  for (int64_t p = 0; p < totals.size(); ++p) {
    out[p] = 0;
    for (int64_t i = first[p]; i < first[p + 1]; ++i) out[p] += in[i];
  }
}

void CountZerosCpu(const Context&, const Tensor& data, int64_t origin, const PieceList& list, const Tensor& count) {
  const float* x = data.as<float>();
  int64_t zeros = 0;
#pragma omp parallel for schedule(static) reduction(+ : zeros)
  for (int64_t i = 0; i < list.count; ++i) {
    const float* piece = x + (list.pieces[i].begin - origin);
    for (int64_t k = 0; k < list.pieces[i].count; ++k) zeros += piece[k] == 0.0f ? 1 : 0;
  }
  *count.as<int64_t>() = zeros;
}

template <class T>
void Update(const AdamBuffers& b, const PieceList& list, const AdamFactors& decay, const AdamFactors& no_decay) {
  const float* gradients = b.gradient.as<float>();
  float *first = b.first.as<float>(), *second = b.second.as<float>(), *master = b.master.as<float>();
  T* values = b.value.empty() ? nullptr : b.value.as<T>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < list.count; ++i) {
    const UpdatePiece& piece = list.pieces[i];
    const int64_t local = piece.begin - b.origin;
    AdamUpdate<T>(piece.decays != 0 ? decay : no_decay, piece.count, gradients + piece.begin, first + local, second + local,
                  master + local, values == nullptr ? nullptr : values + piece.begin);
  }
}

float JoinMaster(BFloat16 value, BFloat16 remainder) {
  const auto upper = static_cast<uint32_t>(value.bits - (remainder.bits >> 15));
  return std::bit_cast<float>(upper << 16 | remainder.bits);
}
void SplitMaster(float master, BFloat16* value, BFloat16* remainder) {
  const auto bits = std::bit_cast<uint32_t>(master);
  value->bits = static_cast<uint16_t>((bits >> 16) + (bits >> 15 & 1u));
  remainder->bits = static_cast<uint16_t>(bits);
}

// Moments of type M, the master in F32 or split: runs of elements are widened, updated and narrowed. V is the value's type.
template <class V, class M, bool kSplit>
void UpdateNarrow(const AdamBuffers& b, const UpdatePiece& piece, const AdamFactors& factors) {
  constexpr int64_t kRun = 256;
  float first[kRun], second[kRun], joined[kRun];
  for (int64_t done = 0; done < piece.count; done += kRun) {
    const int64_t count = std::min(kRun, piece.count - done), begin = piece.begin + done, local = begin - b.origin;
    M *m = b.first.as<M>() + local, *v = b.second.as<M>() + local;
    for (int64_t i = 0; i < count; ++i) {
      first[i] = ToFloat(m[i]);
      second[i] = ToFloat(v[i]);
    }
    const float* gradient = b.gradient.as<float>() + begin;
    if constexpr (kSplit) {
      BFloat16 *value = b.value.as<BFloat16>() + begin, *remainder = b.remainder.as<BFloat16>() + local;
      for (int64_t i = 0; i < count; ++i) joined[i] = JoinMaster(value[i], remainder[i]);
      AdamUpdate<float>(factors, count, gradient, first, second, joined, nullptr);
      for (int64_t i = 0; i < count; ++i) SplitMaster(joined[i], value + i, remainder + i);
    } else {
      V* value = b.value.empty() ? nullptr : b.value.as<V>() + begin;
      AdamUpdate<V>(factors, count, gradient, first, second, b.master.as<float>() + local, value);
    }
    for (int64_t i = 0; i < count; ++i) {
      m[i] = FromFloat<M>(first[i]);
      v[i] = FromFloat<M>(second[i]);
    }
  }
}

template <class V, class M, bool kSplit>
void UpdateNarrowPieces(const AdamBuffers& b, const PieceList& list, const AdamFactors& decay, const AdamFactors& no_decay) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < list.count; ++i) {
    UpdateNarrow<V, M, kSplit>(b, list.pieces[i], list.pieces[i].decays != 0 ? decay : no_decay);
  }
}

void UpdatePiecesCpu(const Context&, const AdamBuffers& buffers, const PieceList& list, const AdamFactors& decay,
                     const AdamFactors& no_decay) {
  if (!buffers.remainder.empty()) {
    if (buffers.first.dtype == DType::kBF16) return UpdateNarrowPieces<BFloat16, BFloat16, true>(buffers, list, decay, no_decay);
    return UpdateNarrowPieces<BFloat16, float, true>(buffers, list, decay, no_decay);
  }
  if (buffers.first.dtype == DType::kBF16) {
    if (buffers.value.empty()) return UpdateNarrowPieces<float, BFloat16, false>(buffers, list, decay, no_decay);
    if (buffers.value.dtype == DType::kBF16) return UpdateNarrowPieces<BFloat16, BFloat16, false>(buffers, list, decay, no_decay);
    return UpdateNarrowPieces<Float16, BFloat16, false>(buffers, list, decay, no_decay);
  }
  if (buffers.value.empty()) return Update<float>(buffers, list, decay, no_decay);
  if (buffers.value.dtype == DType::kBF16) return Update<BFloat16>(buffers, list, decay, no_decay);
  Update<Float16>(buffers, list, decay, no_decay);
}

}  // namespace

Op<void(const Context&, const Tensor&, int64_t, const PieceList&, float, const Tensor&)> SumOfSquares{&SumOfSquaresCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&)> SumByParameter{&SumByParameterCpu};
Op<void(const Context&, const Tensor&, int64_t, const PieceList&, const Tensor&)> CountZeros{&CountZerosCpu};
Op<void(const Context&, const AdamBuffers&, const PieceList&, const AdamFactors&, const AdamFactors&)> UpdatePieces{
    &UpdatePiecesCpu};

}  // namespace mbridge
