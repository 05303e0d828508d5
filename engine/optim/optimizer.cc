#include "engine/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace mbridge {
namespace {

// Elements. Shards begin at multiples of it and norms are summed by it.
constexpr int64_t kBlock = 16384;
// Elements exchanged with each peer at once by a sharded optimizer, a multiple of kBlock.
constexpr int64_t kExchange = 16 * kBlock;
// Elements a collective of the replicated optimizer handles at once.
constexpr int64_t kBucket = int64_t{1} << 20;

// Sum of (x * scale)^2 in eight fixed lanes.
double SumOfSquares(const float* x, int64_t count, float scale) {
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

void Multiply(float* x, int64_t count, float factor) {
#pragma omp parallel for simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

template <class T> void Widen(const T* from, int64_t count, float* to) {
#pragma omp parallel for simd
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat(from[i]);
}

Tensor View1D(void* data, DType dtype, int64_t count) { return {data, dtype, DeviceType::kCpu, {count}}; }

}  // namespace

Optimizer::Optimizer(ParameterStore* store, const OptimizerOptions& options, Communicator* data_parallel,
                     Communicator* tensor_parallel)
    : store_(store),
      options_(options),
      data_parallel_(data_parallel),
      tensor_parallel_(tensor_parallel != nullptr && tensor_parallel->size() > 1 ? tensor_parallel : nullptr),
      loss_scaler_(options.loss_scaler),
      sharded_(options.shard_over_data_parallel && data_parallel->size() > 1) {
  PlanPieces();
  const int64_t count = shard_end_ - shard_begin_;
  const int64_t arrays = store->dtype() == DType::kF32 ? 2 : 3;
  memory_.reset(new (std::nothrow) float[static_cast<size_t>(count * arrays)]());
  if (memory_ == nullptr) {
    throw EngineError(v1::REASON_OUT_OF_MEMORY, fmt::format("cannot allocate {} bytes of optimizer state", StateBytes()));
  }
  first_moment_ = memory_.get();
  second_moment_ = first_moment_ + count;
  if (arrays == 3) masters_ = second_moment_ + count;
  TakeMastersFromValues();
}

void Optimizer::PlanPieces() {
  const int64_t total = store_->values().size();
  const int64_t ranks = sharded_ ? data_parallel_->size() : 1;
  const int64_t blocks = (total + kBlock - 1) / kBlock;
  shard_length_ = (blocks + ranks - 1) / ranks * kBlock;
  shard_begin_ = sharded_ ? std::min(total, data_parallel_->rank() * shard_length_) : 0;
  shard_end_ = std::min(total, shard_begin_ + shard_length_);

  const auto* base = static_cast<const float*>(store_->main_grads().data);
  for (size_t p = 0; p < store_->parameters().size(); ++p) {
    if (!store_->parameters()[p].spec.trainable) continue;
    const Tensor& gradient = store_->parameters()[p].main_grad;
    int64_t begin = static_cast<const float*>(gradient.data) - base;
    const int64_t end = begin + gradient.size();
    while (begin < end) {
      const int64_t next = std::min(end, (begin / kBlock + 1) * kBlock);
      pieces_.push_back({static_cast<int>(p), begin, next - begin});
      begin = next;
    }
  }
  const auto piece_at = [&](int64_t offset) {
    const auto it =
        std::lower_bound(pieces_.begin(), pieces_.end(), offset, [](const Piece& piece, int64_t at) { return piece.begin < at; });
    return static_cast<size_t>(it - pieces_.begin());
  };
  first_piece_ = piece_at(shard_begin_);
  last_piece_ = piece_at(shard_end_);
  piece_sums_.resize(pieces_.size());
}

float* Optimizer::master(int64_t offset) const {
  if (masters_ != nullptr) return masters_ + (offset - shard_begin_);
  return static_cast<float*>(store_->values().data) + offset;
}

void Optimizer::TakeMastersFromValues() {
  if (masters_ == nullptr) return;
  const int64_t count = shard_end_ - shard_begin_;
  const Tensor values = store_->values().Rows(shard_begin_, count);
  if (store_->dtype() == DType::kBF16)
    Widen(values.as<BFloat16>(), count, masters_);
  else
    Widen(values.as<Float16>(), count, masters_);
}

bool Optimizer::CountsHere(int parameter) const {
  return tensor_parallel_ == nullptr || tensor_parallel_->rank() == 0 || store_->parameters()[parameter].spec.shard_axis >= 0;
}

void Optimizer::ReduceGradients() {
  ReduceOverData();
  if (tensor_parallel_ != nullptr) SumPartialGradients();
}

// One collective for all of them: they are small and many.
void Optimizer::SumPartialGradients() {
  float* const data = store_->main_grads().as<float>();
  const auto for_each = [&](auto&& body) {
    int64_t at = 0;
    for (size_t i = first_piece_; i < last_piece_; ++i) {
      const Piece& piece = pieces_[i];
      if (!store_->parameters()[piece.parameter].spec.partial_gradient) continue;
      body(piece, at);
      at += piece.count;
    }
    return at;
  };
  const int64_t count = for_each([](const Piece&, int64_t) {});
  if (count == 0) return;
  staging_.resize(std::max(staging_.size(), static_cast<size_t>(count)));
  for_each([&](const Piece& piece, int64_t at) { std::copy_n(data + piece.begin, piece.count, staging_.data() + at); });
  tensor_parallel_->AllReduce(View1D(staging_.data(), DType::kF32, count), ReduceOp::kSum);
  for_each([&](const Piece& piece, int64_t at) { std::copy_n(staging_.data() + at, piece.count, data + piece.begin); });
}

void Optimizer::ReduceOverData() {
  const int ranks = data_parallel_->size();
  if (ranks == 1) return;
  const Tensor gradients = store_->main_grads();
  const int64_t total = gradients.size();
  Multiply(gradients.as<float>(), total, static_cast<float>(1.0 / ranks));
  if (!sharded_) {
    for (int64_t begin = 0; begin < total; begin += kBucket) {
      data_parallel_->AllReduce(gradients.Rows(begin, std::min(kBucket, total - begin)), ReduceOp::kSum);
    }
    return;
  }
  float* const data = gradients.as<float>();
  for (int64_t offset = 0; offset < shard_length_; offset += kExchange) {
    const int64_t count = std::min(kExchange, shard_length_ - offset);
    staging_.resize(static_cast<size_t>(count * (ranks + 1)));
    for (int rank = 0; rank < ranks; ++rank) {
      // Beyond the buffer's end zeros are sent.
      const int64_t begin = rank * shard_length_ + offset;
      const int64_t present = std::clamp<int64_t>(total - begin, 0, count);
      float* part = staging_.data() + rank * count;
      if (present > 0) std::memcpy(part, data + begin, static_cast<size_t>(present) * sizeof(float));
      std::fill(part + present, part + count, 0.0f);
    }
    float* own = staging_.data() + ranks * count;
    data_parallel_->ReduceScatter(View1D(staging_.data(), DType::kF32, count * ranks), View1D(own, DType::kF32, count));
    const int64_t present = std::clamp<int64_t>(shard_end_ - (shard_begin_ + offset), 0, count);
    if (present > 0) std::memcpy(data + shard_begin_ + offset, own, static_cast<size_t>(present) * sizeof(float));
  }
}

float Optimizer::Norm(const float* data, int64_t data_origin, float scale) {
  std::fill(piece_sums_.begin(), piece_sums_.end(), 0.0);
#pragma omp parallel for schedule(static)
  for (size_t i = first_piece_; i < last_piece_; ++i) {
    piece_sums_[i] = SumOfSquares(data + (pieces_[i].begin - data_origin), pieces_[i].count, scale);
  }
  // The other ranks' pieces are zero here, so that the sum adds nothing but zeros.
  if (sharded_) {
    data_parallel_->AllReduce(View1D(piece_sums_.data(), DType::kF64, static_cast<int64_t>(piece_sums_.size())), ReduceOp::kSum);
  }
  double total = 0;
  for (size_t i = 0; i < pieces_.size();) {
    double squares = 0;
    const int parameter = pieces_[i].parameter;
    for (; i < pieces_.size() && pieces_[i].parameter == parameter; ++i) squares += piece_sums_[i];
    const double norm = static_cast<float>(std::sqrt(squares));
    if (CountsHere(parameter)) total += norm * norm;
  }
  if (tensor_parallel_ != nullptr) tensor_parallel_->AllReduce(View1D(&total, DType::kF64, 1), ReduceOp::kSum);
  return static_cast<float>(std::sqrt(total));
}

template <class T> void Optimizer::UpdateAll(const AdamFactors& decay, const AdamFactors& no_decay) {
  const float* gradients = store_->main_grads().as<float>();
  T* values = masters_ == nullptr ? nullptr : static_cast<T*>(store_->values().data);
#pragma omp parallel for schedule(static)
  for (size_t i = first_piece_; i < last_piece_; ++i) {
    const Piece& piece = pieces_[i];
    const int64_t local = piece.begin - shard_begin_;
    const bool decays = store_->parameters()[piece.parameter].spec.weight_decay;
    AdamUpdate<T>(decays ? decay : no_decay, piece.count, gradients + piece.begin, first_moment_ + local, second_moment_ + local,
                  master(piece.begin), values == nullptr ? nullptr : values + piece.begin);
  }
}

void Optimizer::GatherValues() {
  const Tensor values = store_->values();
  const size_t width = SizeOf(values.dtype);
  const int64_t total = values.size();
  const int ranks = data_parallel_->size();
  char* const data = static_cast<char*>(values.data);
  for (int64_t offset = 0; offset < shard_length_; offset += kExchange) {
    const int64_t count = std::min(kExchange, shard_length_ - offset);
    staging_.resize(static_cast<size_t>(count * (ranks + 1)));
    char* all = reinterpret_cast<char*>(staging_.data());
    char* own = reinterpret_cast<char*>(staging_.data() + count * ranks);
    std::memset(own, 0, static_cast<size_t>(count) * width);
    const int64_t present = std::clamp<int64_t>(shard_end_ - (shard_begin_ + offset), 0, count);
    if (present > 0)
      std::memcpy(own, data + static_cast<size_t>(shard_begin_ + offset) * width, static_cast<size_t>(present) * width);
    data_parallel_->AllGather(View1D(own, values.dtype, count), View1D(all, values.dtype, count * ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin = rank * shard_length_ + offset;
      const int64_t length = std::clamp<int64_t>(total - begin, 0, count);
      if (length <= 0) continue;
      std::memcpy(data + static_cast<size_t>(begin) * width, all + static_cast<size_t>(rank * count) * width,
                  static_cast<size_t>(length) * width);
    }
  }
}

int64_t Optimizer::CountZeros() const {
  const float* gradients = store_->main_grads().as<float>();
  int64_t zeros = 0;
#pragma omp parallel for schedule(static) reduction(+ : zeros)
  for (size_t i = first_piece_; i < last_piece_; ++i) {
    if (!CountsHere(pieces_[i].parameter)) continue;
    const float* x = gradients + pieces_[i].begin;
    for (int64_t k = 0; k < pieces_[i].count; ++k) zeros += x[k] == 0.0f ? 1 : 0;
  }
  if (sharded_) data_parallel_->AllReduce(View1D(&zeros, DType::kI64, 1), ReduceOp::kSum);
  if (tensor_parallel_ != nullptr) tensor_parallel_->AllReduce(View1D(&zeros, DType::kI64, 1), ReduceOp::kSum);
  return zeros;
}

StepResult Optimizer::Step(double lr, double weight_decay) {
  StepResult result;
  result.loss_scale = loss_scaler_.scale();
  const float unscale = loss_scaler_.inverse_scale();
  result.gradient_norm = Norm(store_->main_grads().as<float>(), 0, unscale);
  if (options_.count_zero_gradients) result.zero_gradients = CountZeros();
  result.updated = std::isfinite(result.gradient_norm);
  loss_scaler_.Update(!result.updated);
  if (!result.updated) return result;

  ++step_count_;
  float clip = 1.0f;
  if (options_.clip_grad > 0) {
    const double coefficient = options_.clip_grad / (static_cast<double>(result.gradient_norm) + 1e-6);
    if (coefficient < 1.0) clip = static_cast<float>(coefficient);
  }
  const AdamFactors decay = MakeAdamFactors(options_.adam, step_count_, lr, weight_decay, unscale, clip);
  const AdamFactors no_decay = MakeAdamFactors(options_.adam, step_count_, lr, 0.0, unscale, clip);
  switch (store_->dtype()) {
    case DType::kBF16: UpdateAll<BFloat16>(decay, no_decay); break;
    case DType::kF16: UpdateAll<Float16>(decay, no_decay); break;
    default: UpdateAll<float>(decay, no_decay);
  }
  if (sharded_) GatherValues();
  return result;
}

float Optimizer::ParameterNorm() {
  return masters_ == nullptr ? Norm(store_->values().as<float>(), 0, 1.0f) : Norm(masters_, shard_begin_, 1.0f);
}

std::string Optimizer::FindNonFiniteGradient() const {
  const float* gradients = store_->main_grads().as<float>();
  for (const Piece& piece : pieces_) {
    if (!std::isfinite(SumOfSquares(gradients + piece.begin, piece.count, 1.0f)))
      return store_->parameters()[piece.parameter].spec.name;
  }
  return "";
}

void Optimizer::Restore(int64_t step_count, const LossScaler::State& loss_scaler) {
  step_count_ = step_count;
  loss_scaler_.Restore(loss_scaler);
}

std::vector<OptimizerStateTensor> Optimizer::StateTensors() const {
  std::vector<OptimizerStateTensor> tensors;
  const auto* base = static_cast<const float*>(store_->main_grads().data);
  const auto add = [&](const char* kind, float* array) {
    for (size_t index = 0; index < store_->parameters().size(); ++index) {
      const Parameter& parameter = store_->parameters()[index];
      if (!parameter.spec.trainable) continue;
      const int64_t offset = static_cast<const float*>(parameter.main_grad.data) - base;
      const int64_t begin = std::max(offset, shard_begin_);
      const int64_t end = std::min(offset + parameter.main_grad.size(), shard_end_);
      if (begin >= end) continue;
      Tensor view = View1D(array + (begin - shard_begin_), DType::kF32, end - begin);
      if (end - begin == parameter.main_grad.size()) view = view.View(parameter.spec.shape);
      tensors.push_back({fmt::format("optimizer.state.{}.{}", kind, parameter.spec.name), &parameter.spec, view, begin - offset,
                         (sharded_ || data_parallel_->rank() == 0) && CountsHere(static_cast<int>(index))});
    }
  };
  if (masters_ != nullptr) add("fp32_param", masters_);
  add("exp_avg", first_moment_);
  add("exp_avg_sq", second_moment_);
  return tensors;
}

int64_t Optimizer::StateBytes() const {
  return (shard_end_ - shard_begin_) * (store_->dtype() == DType::kF32 ? 2 : 3) * static_cast<int64_t>(sizeof(float));
}

}  // namespace mbridge
