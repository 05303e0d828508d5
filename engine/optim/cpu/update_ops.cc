#include "engine/optim/update_ops.h"

namespace mbridge {
namespace {

// In eight fixed lanes.
double SquaresOf(const float* x, int64_t count, float scale) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const double value = static_cast<double>(x[i + lane] * scale);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    const double value = static_cast<double>(x[i] * scale);
    lanes[i % 8] += value * value;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

void SumOfSquaresCpu(const Context&, const Tensor& data, int64_t origin, const PieceList& list, float scale, const Tensor& sums) {
  const float* x = data.as<float>();
  double* out = sums.as<double>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < list.count; ++i) out[i] = SquaresOf(x + (list.pieces[i].begin - origin), list.pieces[i].count, scale);
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

void UpdatePiecesCpu(const Context&, const AdamBuffers& buffers, const PieceList& list, const AdamFactors& decay,
                     const AdamFactors& no_decay) {
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
