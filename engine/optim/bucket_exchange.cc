#include "engine/optim/bucket_exchange.h"

#include <algorithm>

#include "engine/core/device.h"
#include "engine/ops/scale.h"

namespace mbridge {
namespace {

// Elements exchanged with each peer at once through staging memory, a multiple of the block.
constexpr int64_t kExchange = 16 * BucketExchange::kBlock;

int64_t DefaultElements(int ranks) { return std::max<int64_t>(40'000'000, int64_t{1'000'000} * ranks); }

}  // namespace

int64_t BucketExchange::BucketElements(const BucketOptions& options, int ranks) {
  const int64_t wanted = options.elements > 0 ? options.elements : DefaultElements(ranks);
  const int64_t unit = ranks * kBlock;
  return (wanted + unit - 1) / unit * unit;
}

BucketExchange::BucketExchange(ParameterStore* store, const BucketOptions& options, bool sharded, Communicator* data_parallel,
                               const Context& context)
    : store_(store),
      options_(options),
      data_parallel_(data_parallel),
      context_(context),
      device_(DeviceOf(context.device)),
      ranks_(data_parallel->size()),
      sharded_(sharded && ranks_ > 1),
      in_place_(context.device != DeviceType::kCpu),
      overlap_reduce_(options.overlap_reduce && ranks_ > 1),
      overlap_gather_(options.overlap_gather && sharded_),
      group_(data_parallel) {
  PlanBuckets();
  next_reduction_ = gathers_started_ = gathers_joined_ = count();
  if (overlap_reduce_ || overlap_gather_) {
    side_ = MakeSideStream(context, 2 * count());
    twin_ = data_parallel->Twin(side_->context());
    group_ = twin_.get();
  } else {
    side_ = MakeInlineStream(context);
  }
  if (sharded_ && !in_place_) {
    const int64_t part = std::min(kExchange, PartLength(0));
    staging_ = AllocateZeroed(context.device, static_cast<size_t>(part * (ranks_ + 1)) * sizeof(float), "the exchange of shards");
  }
}

BucketExchange::~BucketExchange() {
  side_->Stop();  // Before the communicator that its work uses goes, which in turn goes before a stream.
  twin_.reset();
}

void BucketExchange::PlanBuckets() {
  const int64_t total = store_->values().size(), length = ranks_ == 1 ? total : BucketElements(options_, ranks_);
  for (int64_t begin = 0; begin < total; begin += length) buckets_.push_back({begin, std::min(total, begin + length)});
  if (buckets_.empty()) buckets_.push_back({});
  if (sharded_ && in_place_) {
    const int64_t needed = buckets_.back().begin + PartLength(count() - 1) * ranks_;
    if (needed > store_->capacity()) {
      ThrowEngineError("parameter buffers of {} elements, {} shards need {}", store_->capacity(), ranks_, needed);
    }
  }
  const auto* base = static_cast<const float*>(store_->main_grads().data);
  int64_t end = 0;
  for (const Parameter& parameter : store_->parameters()) {
    if (parameter.spec.trainable) end = static_cast<const float*>(parameter.main_grad.data) - base;
    begins_.push_back(end);
    if (parameter.spec.trainable) end += parameter.main_grad.size();
  }
  begins_.push_back(total);
}

int64_t BucketExchange::PartLength(int index) const {
  const Range whole = bucket(index);
  const int64_t blocks = (whole.end - whole.begin + kBlock - 1) / kBlock;
  return (blocks + ranks_ - 1) / ranks_ * kBlock;
}

BucketExchange::Range BucketExchange::own(int index) const {
  const Range whole = bucket(index);
  if (!sharded_) return whole;
  const int64_t part = PartLength(index), begin = std::min(whole.end, whole.begin + data_parallel_->rank() * part);
  return {begin, std::min(whole.end, begin + part)};
}

void BucketExchange::BeginLastBackward() {
  next_reduction_ = count();
  last_backward_ = true;
}

void BucketExchange::GradientsAdded(int first) {
  if (last_backward_ && overlap_reduce_) StartReductions(begins_[static_cast<size_t>(first)]);
}

void BucketExchange::FinishReduction() {
  if (ranks_ == 1) return;
  if (!last_backward_) BeginLastBackward();
  StartReductions(0);
  side_->Join(0);  // The last one.
  last_backward_ = false;
}

void BucketExchange::StartReductions(int64_t from) {
  while (next_reduction_ > 0 && bucket(next_reduction_ - 1).begin >= from) {
    const int index = --next_reduction_;
    side_->Start(index, [this, index] { Reduce(index); });
  }
}

void BucketExchange::Reduce(int index) {
  const Range whole = bucket(index);
  const Tensor gradients = store_->main_grads().Rows(whole.begin, whole.end - whole.begin);
  Scale(side_->context(), gradients, static_cast<float>(1.0 / ranks_), DType::kF32, gradients);
  if (!sharded_) {
    group_->AllReduce(gradients, ReduceOp::kSum);
  } else if (in_place_) {
    const int64_t part = PartLength(index);
    const Tensor padded{gradients.data, DType::kF32, context_.device, {part * ranks_}};
    group_->ReduceScatter(padded, padded.Rows(group_->rank() * part, part));
  } else {
    ReduceThroughStaging(index);
  }
}

void BucketExchange::StartGather(int index) {
  if (index == 0) gathers_joined_ = gathers_started_ = 0;
  ++gathers_started_;
  side_->Start(count() + index, [this, index] { Gather(index); });
}

void BucketExchange::Gather(int index) {
  if (!in_place_) return GatherThroughStaging(index);
  const Tensor values = store_->values();
  const int64_t part = PartLength(index);
  const Tensor padded{values.Rows(bucket(index).begin, 0).data, values.dtype, context_.device, {part * ranks_}};
  group_->AllGather(padded.Rows(group_->rank() * part, part), padded);
}

void BucketExchange::BeforeUse(int end) {
  if (gathers_joined_ == gathers_started_) return;
  const int64_t read = begins_[static_cast<size_t>(end)];
  const auto after = std::partition_point(buckets_.begin(), buckets_.end(), [read](const Range& b) { return b.begin < read; });
  JoinGathers(static_cast<int>(after - buckets_.begin()));
}

// The work is done in order: to wait for the last one is enough.
void BucketExchange::JoinGathers(int end) {
  end = std::min(end, gathers_started_);
  if (end <= gathers_joined_) return;
  side_->Join(count() + end - 1);
  gathers_joined_ = end;
}

int64_t BucketExchange::Present(int index, int rank, int64_t offset, int64_t most) const {
  const Range whole = bucket(index);
  return std::clamp<int64_t>(whole.end - (whole.begin + rank * PartLength(index) + offset), 0, most);
}

// Beyond the buffer's end zeros are sent.
void BucketExchange::ReduceThroughStaging(int index) {
  const Context& context = side_->context();
  float* const data = store_->main_grads().as<float>() + bucket(index).begin;
  auto* const staging = static_cast<float*>(staging_.get());
  const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  const auto view = [&](float* from, int64_t count) { return Tensor{from, DType::kF32, context_.device, {count}}; };
  const int64_t length = PartLength(index);
  for (int64_t offset = 0; offset < length; offset += kExchange) {
    const int64_t count = std::min(kExchange, length - offset);
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t present = Present(index, rank, offset, count);
      float* const part = staging + rank * count;
      if (present > 0) device_.CopyOnDevice(context, part, data + rank * length + offset, bytes(present));
      if (present < count) device_.Zero(context, part + present, bytes(count - present));
    }
    float* const own = staging + ranks_ * count;
    group_->ReduceScatter(view(staging, count * ranks_), view(own, count));
    const int64_t present = Present(index, group_->rank(), offset, count);
    if (present > 0) device_.CopyOnDevice(context, data + group_->rank() * length + offset, own, bytes(present));
  }
}

void BucketExchange::GatherThroughStaging(int index) {
  const Context& context = side_->context();
  const Tensor values = store_->values();
  const auto bytes = [width = SizeOf(values.dtype)](int64_t count) { return static_cast<size_t>(count) * width; };
  const auto view = [&](char* from, int64_t count) { return Tensor{from, values.dtype, context_.device, {count}}; };
  char* const data = static_cast<char*>(values.data) + bytes(bucket(index).begin);
  char* const all = static_cast<char*>(staging_.get());
  const int64_t length = PartLength(index);
  for (int64_t offset = 0; offset < length; offset += kExchange) {
    const int64_t count = std::min(kExchange, length - offset);
    char* const own = all + bytes(count * ranks_);
    const int64_t held = Present(index, group_->rank(), offset, count);
    if (held > 0) device_.CopyOnDevice(context, own, data + bytes(group_->rank() * length + offset), bytes(held));
    if (held < count) device_.Zero(context, own + bytes(held), bytes(count - held));
    group_->AllGather(view(own, count), view(all, count * ranks_));
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t present = Present(index, rank, offset, count);
      // Not its own part: another thread may be reading it.
      if (present == 0 || rank == group_->rank()) continue;
      device_.CopyOnDevice(context, data + bytes(rank * length + offset), all + bytes(rank * count), bytes(present));
    }
  }
}

std::string BucketExchange::WarnOfManyBuckets(int64_t elements, const BucketOptions& options, int ranks) {
  constexpr int64_t kFew = 64, kTimesTheDefault = 4;
  if (ranks == 1 || options.elements == 0) return "";
  const auto buckets = [&](const BucketOptions& of) {
    const int64_t length = BucketElements(of, ranks);
    return (elements + length - 1) / length;
  };
  const int64_t count = buckets(options), usual = buckets({}), most = std::max(kFew, kTimesTheDefault * usual);
  if (count <= most) return "";
  return fmt::format(
      "warning: ddp.bucket_size={} makes {} buckets, and each waits for the start of its collectives. Leave it out, which means "
      "{} "
      "and makes {}, or give at least {}",
      options.elements, count, DefaultElements(ranks), usual, (elements + most - 1) / most);
}

std::string BucketExchange::Describe() const {
  if (ranks_ == 1) return "";
  std::string text = fmt::format("data parallelism: {} ranks, {} bucket{} of up to {} elements; gradients are reduced {}", ranks_,
                                 count(), count() == 1 ? "" : "s", BucketElements(options_, ranks_),
                                 overlap_reduce_ ? "while backward runs" : "after backward");
  if (sharded_) text += fmt::format(", parameters gathered {}", overlap_gather_ ? "while forward runs" : "before forward");
  return text;
}

}  // namespace mbridge
