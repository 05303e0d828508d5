#include "engine/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "engine/ops/convert.h"

namespace mbridge {
namespace {

constexpr int64_t kBlock = BucketExchange::kBlock;

std::shared_ptr<void> AllocateHost(Device* device, size_t bytes) {
  return {device->AllocateHost(bytes), [device](void* memory) { device->FreeHost(memory); }};
}

}  // namespace

int64_t Optimizer::SpareElements(int data_parallel_ranks) { return data_parallel_ranks * kBlock; }

Optimizer::Optimizer(ParameterStore* store, const OptimizerOptions& options, Communicator* data_parallel,
                     Communicator* tensor_parallel, const Context& context)
    : store_(store),
      options_(options),
      data_parallel_(data_parallel),
      tensor_parallel_(tensor_parallel != nullptr && tensor_parallel->size() > 1 ? tensor_parallel : nullptr),
      context_(context),
      device_(DeviceOf(context.device)),
      loss_scaler_(options.loss_scaler),
      sharded_(options.shard_over_data_parallel && data_parallel->size() > 1),
      exchange_(store, options.buckets, sharded_, data_parallel, context) {
  if (store->device() != context.device) ThrowEngineError("an optimizer on another device than its parameters");
  if (options.split_masters && store->dtype() != DType::kBF16) {
    ThrowEngineError("split masters of a model in {}: BF16 only", NameOf(store->dtype()));
  }
  PlanPieces();
  AllocateMemory();
  TakeMastersFromValues();
}

void Optimizer::PlanPieces() {
  const auto* base = static_cast<const float*>(store_->main_grads().data);
  for (size_t p = 0; p < store_->parameters().size(); ++p) {
    const Parameter& parameter = store_->parameters()[p];
    // NOLINTNEXTLINE(readability-container-size-empty): a tensor is empty() without memory; this asks for elements.
    if (!parameter.spec.trainable || parameter.main_grad.size() == 0) continue;
    parameters_.push_back(static_cast<int>(p));
    int64_t begin = static_cast<const float*>(parameter.main_grad.data) - base;
    const int64_t end = begin + parameter.main_grad.size();
    while (begin < end) {
      const int64_t next = std::min(end, (begin / kBlock + 1) * kBlock);
      pieces_.push_back({begin, static_cast<int32_t>(next - begin), parameter.spec.weight_decay ? 1 : 0});
      piece_parameters_.push_back(static_cast<int>(p));
      begin = next;
    }
  }
  const auto piece_at = [&](int64_t offset) {
    const auto it = std::lower_bound(pieces_.begin(), pieces_.end(), offset,
                                     [](const UpdatePiece& piece, int64_t at) { return piece.begin < at; });
    return static_cast<size_t>(it - pieces_.begin());
  };
  int64_t state = 0;
  const auto add = [&](int64_t begin, int64_t end) {
    shards_.push_back({begin, end, state, piece_at(begin), piece_at(end)});
    state += end - begin;
  };
  if (!sharded_) return add(0, store_->values().size());
  for (int i = 0; i < exchange_.count(); ++i) add(exchange_.own(i).begin, exchange_.own(i).end);
}

void Optimizer::AllocateMemory() {
  const auto on_device = [&](size_t bytes, const char* purpose) {
    memory_.push_back(AllocateZeroed(context_.device, std::max<size_t>(bytes, 64), purpose));
    return memory_.back().get();
  };
  const auto upload = [&](const void* host, size_t bytes) {
    void* const memory = on_device(bytes, "the optimizer's plan");
    device_.CopyToDevice(context_, memory, host, bytes);
    device_.Synchronize(context_);
    return memory;
  };
  const auto list_of = [&](const std::vector<UpdatePiece>& pieces) {
    const void* memory = upload(pieces.data(), pieces.size() * sizeof(UpdatePiece));
    return PieceList{static_cast<const UpdatePiece*>(memory), static_cast<int64_t>(pieces.size())};
  };
  const auto on_host = [&](size_t bytes) {
    memory_.push_back(AllocateHost(&device_, std::max<size_t>(bytes, 64)));
    return memory_.back().get();
  };

  const int64_t count = shards_.back().state + shards_.back().size();
  const auto state = [&](DType dtype) {
    return View(on_device(static_cast<size_t>(count) * SizeOf(dtype), "optimizer state"), dtype, count);
  };
  first_moment_ = state(options_.moment_dtype);
  second_moment_ = state(options_.moment_dtype);
  if (options_.split_masters) {
    remainders_ = state(DType::kBF16);
  } else if (store_->dtype() != DType::kF32) {
    masters_ = state(DType::kF32);
  }

  all_pieces_ = list_of(pieces_);
  if (options_.count_zero_gradients) {
    std::vector<UpdatePiece> counted;
    for (const Shard& shard : shards_) {
      for (size_t i = shard.first_piece; i < shard.last_piece; ++i) {
        if (CountsOn(tensor_rank(), piece_parameters_[i])) counted.push_back(pieces_[i]);
      }
    }
    counted_pieces_ = list_of(counted);
    zeros_ = View(on_device(sizeof(int64_t), "the optimizer's sums"), DType::kI64, 1);
    host_zeros_ = static_cast<int64_t*>(on_host(sizeof(int64_t)));
  }
  std::vector<int64_t> firsts;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (i == 0 || piece_parameters_[i] != piece_parameters_[i - 1]) firsts.push_back(static_cast<int64_t>(i));
  }
  firsts.push_back(static_cast<int64_t>(pieces_.size()));
  const auto parameters = static_cast<int64_t>(parameters_.size());
  piece_firsts_ = View(upload(firsts.data(), firsts.size() * sizeof(int64_t)), DType::kI64, parameters + 1);
  piece_sums_ = View(on_device(pieces_.size() * sizeof(double), "the optimizer's sums"), DType::kF64, all_pieces_.count);
  const size_t sums = static_cast<size_t>(tensor_ranks()) * parameters_.size();
  parameter_sums_ = View(on_device(sums * sizeof(double), "the optimizer's sums"), DType::kF64, static_cast<int64_t>(sums));
  host_sums_ = static_cast<double*>(on_host(sums * sizeof(double)));

  const int64_t staging = tensor_parallel_ == nullptr ? 0 : ForEachPartialPiece([](const UpdatePiece&, int64_t) {});
  if (staging > 0) {
    staging_ = View(on_device(static_cast<size_t>(staging) * sizeof(float), "partial gradients"), DType::kF32, staging);
  }
}

void Optimizer::TakeMastersFromValues() {
  exchange_.FinishGather();
  if (!remainders_.empty()) device_.Zero(context_, remainders_.data, remainders_.bytes());
  if (masters_.empty()) return;
  for (const Shard& shard : shards_) {
    if (shard.size() == 0) continue;
    Convert(context_, store_->values().Rows(shard.begin, shard.size()), DType::kF32, StateOf(masters_, shard));
  }
}

bool Optimizer::CountsOn(int tensor_rank, int parameter) const {
  return tensor_rank == 0 || store_->parameters()[parameter].spec.shard_axis >= 0;
}

void Optimizer::ReduceGradients() {
  exchange_.FinishReduction();
  if (tensor_parallel_ != nullptr) SumPartialGradients();
}

template <class Apply> int64_t Optimizer::ForEachPartialPiece(Apply&& apply) const {
  int64_t at = 0;
  for (const Shard& shard : shards_) {
    for (size_t i = shard.first_piece; i < shard.last_piece; ++i) {
      if (!store_->parameters()[piece_parameters_[i]].spec.partial_gradient) continue;
      apply(pieces_[i], at);
      at += pieces_[i].count;
    }
  }
  return at;
}

// One collective for all of them: they are small and many.
void Optimizer::SumPartialGradients() {
  float *const data = store_->main_grads().as<float>(), *const staging = staging_.as<float>();
  const int64_t count = ForEachPartialPiece([&](const UpdatePiece& piece, int64_t at) {
    device_.CopyOnDevice(context_, staging + at, data + piece.begin, static_cast<size_t>(piece.count) * sizeof(float));
  });
  if (count == 0) return;
  tensor_parallel_->AllReduce(staging_.Rows(0, count), ReduceOp::kSum);
  ForEachPartialPiece([&](const UpdatePiece& piece, int64_t at) {
    device_.CopyOnDevice(context_, data + piece.begin, staging + at, static_cast<size_t>(piece.count) * sizeof(float));
  });
}

void Optimizer::SumParameters(const Tensor& data, Extent extent, float scale) const {
  if (extent == Extent::kAll) {
    SumOfSquares(context_, data, 0, all_pieces_, scale, piece_sums_);
  } else {
    device_.Zero(context_, piece_sums_.data, piece_sums_.bytes());
    for (const Shard& shard : shards_) {
      if (shard.pieces() == 0) continue;
      const bool state = extent == Extent::kState;
      SumOfSquares(context_, state ? StateOf(data, shard) : data, state ? shard.begin : 0, PiecesOf(shard), scale,
                   piece_sums_.Rows(static_cast<int64_t>(shard.first_piece), shard.pieces()));
    }
    // The other ranks' pieces are zero here, so that the sum adds nothing but zeros.
    if (sharded_) data_parallel_->AllReduce(piece_sums_, ReduceOp::kSum);
  }
  const auto count = static_cast<int64_t>(parameters_.size());
  const Tensor own = parameter_sums_.Rows(tensor_rank() * count, count);
  SumByParameter(context_, piece_sums_, piece_firsts_, own);
  // Not their sum: each norm is rounded before the host adds them.
  if (tensor_parallel_ != nullptr && extent != Extent::kAll) tensor_parallel_->AllGather(own, parameter_sums_);
  device_.CopyToHost(context_, host_sums_, parameter_sums_.data, parameter_sums_.bytes());
}

float Optimizer::NormOfSums() const {
  double total = 0;
  const double* sums = host_sums_;
  for (int rank = 0; rank < tensor_ranks(); ++rank, sums += parameters_.size()) {
    double of_rank = 0;
    for (size_t p = 0; p < parameters_.size(); ++p) {
      const double norm = static_cast<float>(std::sqrt(sums[p]));
      if (CountsOn(rank, parameters_[p])) of_rank += norm * norm;
    }
    total += of_rank;
  }
  return static_cast<float>(std::sqrt(total));
}

void Optimizer::CountZeroGradients() const {
  CountZeros(context_, store_->main_grads(), 0, counted_pieces_, zeros_);
  if (sharded_) data_parallel_->AllReduce(zeros_, ReduceOp::kSum);
  if (tensor_parallel_ != nullptr) tensor_parallel_->AllReduce(zeros_, ReduceOp::kSum);
  device_.CopyToHost(context_, host_zeros_, zeros_.data, sizeof(int64_t));
}

MeasuredGradients Optimizer::MeasureGradients() {
  exchange_.FinishGather();
  SumParameters(store_->main_grads(), Extent::kOwned, loss_scaler_.inverse_scale());
  if (options_.count_zero_gradients) CountZeroGradients();
  device_.Synchronize(context_);
  return {NormOfSums(), options_.count_zero_gradients ? *host_zeros_ : 0};
}

StepResult Optimizer::Step(const MeasuredGradients& gradients, double lr, double weight_decay) {
  StepResult result;
  result.loss_scale = loss_scaler_.scale();
  const float unscale = loss_scaler_.inverse_scale();
  result.gradient_norm = gradients.norm;
  result.zero_gradients = gradients.zeros;
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
  for (size_t i = 0; i < shards_.size(); ++i) {
    Update(shards_[i], decay, no_decay);
    if (sharded_) exchange_.StartGather(static_cast<int>(i));
  }
  if (!exchange_.overlap_gather()) exchange_.FinishGather();
  return result;
}

void Optimizer::Update(const Shard& shard, const AdamFactors& decay, const AdamFactors& no_decay) {
  if (shard.pieces() == 0) return;
  const bool master_is_value = store_->dtype() == DType::kF32;
  const AdamBuffers buffers{
      .gradient = store_->main_grads(),
      .first = StateOf(first_moment_, shard),
      .second = StateOf(second_moment_, shard),
      .master = master_is_value ? store_->values().Rows(shard.begin, shard.size()) : StateOf(masters_, shard),
      .value = master_is_value ? Tensor() : store_->values(),
      .remainder = StateOf(remainders_, shard),
      .origin = shard.begin};
  UpdatePieces(context_, buffers, PiecesOf(shard), decay, no_decay);
}

float Optimizer::ParameterNorm() {
  if (masters_.empty())
    SumParameters(store_->values(), Extent::kOwned, 1.0f);
  else
    SumParameters(masters_, Extent::kState, 1.0f);
  device_.Synchronize(context_);
  return NormOfSums();
}

std::string Optimizer::FindNonFiniteGradient() const {
  SumParameters(store_->main_grads(), Extent::kAll, 1.0f);
  device_.Synchronize(context_);
  const double* const own = host_sums_ + static_cast<size_t>(tensor_rank()) * parameters_.size();
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (!std::isfinite(own[p])) return store_->parameters()[parameters_[p]].spec.name;
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
  const auto add = [&](const char* kind, const Tensor& array) {
    for (size_t index = 0; index < store_->parameters().size(); ++index) {
      const Parameter& parameter = store_->parameters()[index];
      if (!parameter.spec.trainable) continue;
      const int64_t offset = static_cast<const float*>(parameter.main_grad.data) - base;
      for (const Shard& shard : shards_) {
        const int64_t begin = std::max(offset, shard.begin);
        const int64_t end = std::min(offset + parameter.main_grad.size(), shard.end);
        if (begin >= end) continue;
        Tensor view = array.Rows(shard.state + begin - shard.begin, end - begin);
        if (end - begin == parameter.main_grad.size()) view = view.View(parameter.spec.shape);
        tensors.push_back({fmt::format("optimizer.state.{}.{}", kind, parameter.spec.name), &parameter.spec, view, begin - offset,
                           (sharded_ || data_parallel_->rank() == 0) && CountsOn(tensor_rank(), static_cast<int>(index))});
      }
    }
  };
  if (!masters_.empty()) add("fp32_param", masters_);
  if (!remainders_.empty()) add("fp32_param_remainder", remainders_);
  add("exp_avg", first_moment_);
  add("exp_avg_sq", second_moment_);
  return tensors;
}

int64_t Optimizer::PlannedStateBytes(int64_t elements, DType dtype, const OptimizerOptions& options, int shards) {
  const int64_t blocks = (elements + kBlock - 1) / kBlock;
  const int64_t count = std::min(elements, (blocks + shards - 1) / shards * kBlock);
  const size_t masters = options.split_masters ? SizeOf(DType::kBF16) : dtype == DType::kF32 ? 0 : sizeof(float);
  return count * static_cast<int64_t>(2 * SizeOf(options.moment_dtype) + masters);
}

int64_t Optimizer::StateBytes() const {
  int64_t bytes = 0;
  for (const Tensor& state : {first_moment_, second_moment_, masters_, remainders_}) {
    if (!state.empty()) bytes += static_cast<int64_t>(state.bytes());
  }
  return bytes;
}

}  // namespace mbridge
