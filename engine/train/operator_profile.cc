#include "engine/train/operator_profile.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/core/device.h"
#include "engine/ops/attention.h"
#include "engine/ops/attention_sinks.h"
#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/embedding.h"
#include "engine/ops/flash_attention.h"
#include "engine/ops/fp8_gemm.h"
#include "engine/ops/geglu.h"
#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/grouped_gemm.h"
#include "engine/ops/layer_norm.h"
#include "engine/ops/loss_sum.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/rotary.h"
#include "engine/ops/scale.h"
#include "engine/ops/softmax_cross_entropy.h"
#include "engine/ops/squared_relu.h"
#include "engine/ops/swiglu.h"
#include "engine/ops/vocab_cross_entropy.h"
#include "engine/optim/update_ops.h"

namespace mbridge {
namespace {

constexpr int64_t kWarmIterations = 3;

// How an operator's limit follows from its arguments.
enum class Work {
  kStream,       // Every tensor is read or written once.
  kInPlace,      // The first one both.
  kProduct,      // Gemm and Fp8Gemm.
  kFlash,        // Of the FlashAttentionOptions among the arguments.
  kAttention,    // Of the AttentionOptions.
  kAdam,         // Of the AdamBuffers.
  kTableLookup,  // The last tensor, read and written.
  kTableGradient,
  kUnknown,
};

}  // namespace

struct ProfiledOperator {
  const char* group;
  const char* name;
  Work work = Work::kStream;
  int options = -1;   // Place of the options among the arguments.
  double factor = 1;  // Of the forward's operations.
};

namespace {

OperatorProfile* g_profile = nullptr;

template <class T> ProfiledArgument Describe(const T& x) {
  if constexpr (std::is_same_v<T, Tensor>) {
    if (x.empty() || x.shape.rank() == 0) return {&x};
    const int64_t cols = x.shape[x.shape.rank() - 1];
    return {&x, cols == 0 ? 0 : x.size() / cols, cols, x.dtype};
  } else if constexpr (requires { x.rows, x.cols, x.dtype; }) {
    return {&x, x.rows, x.cols, x.dtype};
  } else if constexpr (requires { x.rows, x.cols, x.format; }) {  // Of 8-bit floats.
    return {&x, x.rows, x.cols, DType::kU8};
  } else {
    return {&x};
  }
}

// What stands in the place of an operator's implementation.
template <auto& kOp, class Signature> struct Hook;
template <auto& kOp, class... Args> struct Hook<kOp, Op<void(const Context&, Args...)>> {
  using Function = void (*)(const Context&, Args...);
  static inline Function original = nullptr;
  static inline ProfiledOperator op;

  static void Run(const Context& context, Args... args) {
    if (!g_profile->Sees(context)) return original(context, args...);
    const ProfiledArgument arguments[] = {Describe(args)..., ProfiledArgument{}};
    g_profile->Begin(context, op, arguments, static_cast<int>(sizeof...(Args)));
    original(context, args...);
    g_profile->End(context);
  }
  static void Set(DeviceType device, bool on) {
    Function& place = device == DeviceType::kCpu ? kOp.cpu : kOp.cuda;
    if (place == nullptr) return;  // No such implementation here.
    if (on) original = place;
    place = on ? &Run : original;
  }
};

using SetHook = void (*)(DeviceType, bool);

template <auto& kOp> SetHook ProfileOf(const ProfiledOperator& op) {
  using Hooked = Hook<kOp, std::remove_reference_t<decltype(kOp)>>;
  Hooked::op = op;
  return &Hooked::Set;
}

void SetHooks(DeviceType device, bool on) {
  static const std::vector<SetHook> hooks = {
      ProfileOf<Gemm>({"matrix products", "product", Work::kProduct}),
      ProfileOf<Fp8Gemm>({"8-bit products", "8-bit product", Work::kProduct}),
      ProfileOf<Fp8Amax>({"8-bit casts", "largest value"}),
      ProfileOf<Fp8Quantize>({"8-bit casts", "cast and transpose"}),
      ProfileOf<FlashAttentionForward>({"attention", "flash attention forward", Work::kFlash, 1, 1.0}),
      ProfileOf<FlashAttentionBackward>({"attention", "flash attention backward", Work::kFlash, 4, 2.5}),
      ProfileOf<AttentionForward>({"attention", "attention forward", Work::kAttention, 2, 1.0}),
      ProfileOf<AttentionBackward>({"attention", "attention backward", Work::kAttention, 4, 2.0}),
      ProfileOf<AddSinksToFlash>({"attention", "sinks forward", Work::kUnknown}),
      ProfileOf<FlashSinkGradients>({"attention", "sinks backward", Work::kUnknown}),
      ProfileOf<RmsNormForward>({"norms", "RMSNorm forward"}),
      ProfileOf<AddRmsNormForward>({"norms", "residual addition and RMSNorm forward"}),
      ProfileOf<RmsNormBackward>({"norms", "RMSNorm backward"}),
      ProfileOf<LayerNormForward>({"norms", "LayerNorm forward"}),
      ProfileOf<LayerNormBackward>({"norms", "LayerNorm backward"}),
      ProfileOf<QkNormForward>({"norms", "query-key norm forward"}),
      ProfileOf<QkNormBackward>({"norms", "query-key norm backward", Work::kInPlace}),
      ProfileOf<Rotary>({"rotary", "rotary", Work::kInPlace}),
      ProfileOf<SwiGluForward>({"activation", "SwiGLU forward"}),
      ProfileOf<SwiGluBackward>({"activation", "SwiGLU backward"}),
      ProfileOf<GegluForward>({"activation", "GEGLU forward"}),
      ProfileOf<GegluBackward>({"activation", "GEGLU backward"}),
      ProfileOf<BiasGeluForward>({"activation", "GELU forward"}),
      ProfileOf<BiasGeluBackward>({"activation", "GELU backward"}),
      ProfileOf<SquaredReluForward>({"activation", "squared ReLU forward"}),
      ProfileOf<SquaredReluBackward>({"activation", "squared ReLU backward"}),
      ProfileOf<BiasDropoutAddForward>({"residual and dropout", "bias, dropout, residual"}),
      ProfileOf<BiasDropoutAddBackward>({"residual and dropout", "bias, dropout, residual backward"}),
      ProfileOf<Dropout>({"residual and dropout", "dropout"}),
      ProfileOf<DrawEagerDropoutMask>({"residual and dropout", "dropout mask"}),
      ProfileOf<DrawCompiledDropoutMask>({"residual and dropout", "dropout mask, compiled"}),
      ProfileOf<BiasAdd>({"residual and dropout", "bias", Work::kInPlace}),
      ProfileOf<AddColumnSums>({"bias gradients", "column sums"}),
      ProfileOf<AddGradient>({"weight gradients", "addition to the main gradient"}),
      ProfileOf<SoftmaxCrossEntropy>({"loss", "cross entropy with gradient", Work::kInPlace}),
      ProfileOf<CrossEntropyFold>({"loss", "cross entropy, running state"}),
      ProfileOf<CrossEntropyGradient>({"loss", "cross entropy, gradient"}),
      ProfileOf<SetTargets>({"loss", "targets"}),
      ProfileOf<AddLossSums>({"loss", "sum of the losses"}),
      ProfileOf<EmbeddingForward>({"embedding", "embedding forward", Work::kTableLookup}),
      ProfileOf<EmbeddingBackward>({"embedding", "embedding backward", Work::kTableGradient}),
      ProfileOf<GroupedGemm>({"expert products", "experts forward", Work::kUnknown}),
      ProfileOf<GroupedGemmInputGradient>({"expert products", "experts input gradient", Work::kUnknown}),
      ProfileOf<GroupedGemmWeightGradient>({"expert products", "experts weight gradient", Work::kUnknown}),
      ProfileOf<Convert>({"copies", "conversion"}),
      ProfileOf<Scale>({"copies", "scale", Work::kInPlace}),
      ProfileOf<SumOfSquares>({"optimizer", "gradient norm"}),
      ProfileOf<SumByParameter>({"optimizer", "gradient norm, totals"}),
      ProfileOf<UpdatePieces>({"optimizer", "Adam", Work::kAdam}),
  };
  for (const SetHook set : hooks) set(device, on);
}

template <class T> const T& Argument(const ProfiledArgument& argument) { return *static_cast<const T*>(argument.address); }

// Scores that a causal window leaves, in each head.
double SeenPairs(int64_t s, int64_t window) {
  const double length = static_cast<double>(s), all = length * length / 2;
  if (window <= 0 || window >= s) return all;
  const double left = length - static_cast<double>(window);
  return all - left * left / 2;
}

double OperationsOf(const ProfiledOperator& known, const ProfiledArgument* a) {
  switch (known.work) {
    case Work::kProduct: {
      const double inner = static_cast<double>(a[0].rows) * static_cast<double>(a[0].cols) / static_cast<double>(a[2].rows);
      return 2.0 * static_cast<double>(a[2].rows) * static_cast<double>(a[2].cols) * inner;
    }
    case Work::kFlash: {
      const auto& o = Argument<FlashAttentionOptions>(a[known.options]);
      return known.factor * 4.0 * SeenPairs(o.seq_length, o.window) * static_cast<double>(o.batch * o.heads * o.head_size);
    }
    case Work::kAttention: {
      const auto& o = Argument<AttentionOptions>(a[known.options]);
      const int64_t width = o.head_size + o.value_width();
      return known.factor * 2.0 * SeenPairs(o.seq_length, o.window) * static_cast<double>(o.batch * o.heads * width);
    }
    default: return 0;
  }
}

double BytesOf(const ProfiledOperator& known, const ProfiledArgument* a, int count) {
  double bytes = 0;
  switch (known.work) {
    case Work::kStream:
    case Work::kInPlace:
      for (int i = 0; i < count; ++i) bytes += static_cast<double>(a[i].bytes());
      return known.work == Work::kInPlace ? bytes + static_cast<double>(a[0].bytes()) : bytes;
    case Work::kTableLookup: return 2.0 * static_cast<double>(a[count - 1].bytes());
    // dy once, its rows of the F32 table twice.
    case Work::kTableGradient: return static_cast<double>(a[1].bytes()) + 8.0 * static_cast<double>(a[1].rows * a[1].cols);
    case Work::kAdam: {
      const auto& b = Argument<AdamBuffers>(a[0]);
      const double moments = static_cast<double>(b.first.bytes() + b.second.bytes()), n = static_cast<double>(b.first.size());
      if (!b.remainder.empty()) return 4 * n + 2 * moments + 8 * n;  // Value and remainder, both read and written.
      return 4 * n + 2 * moments + 8 * n + (b.value.empty() ? 0 : static_cast<double>(SizeOf(b.value.dtype)) * n);
    }
    default: return 0;
  }
}

std::string NameOf(const ProfiledOperator& known, const ProfiledArgument* a) {
  if (known.work == Work::kProduct) {
    const double inner = static_cast<double>(a[0].rows) * static_cast<double>(a[0].cols) / static_cast<double>(a[2].rows);
    return fmt::format("{} into {} [{}, {}], inner {:.0f}", known.name, mbridge::NameOf(a[2].dtype), a[2].rows, a[2].cols, inner);
  }
  if (known.work == Work::kStream || known.work == Work::kInPlace) {
    if (a[0].cols > 0) return fmt::format("{} [{}, {}]", known.name, a[0].rows, a[0].cols);
  }
  return known.name;
}

// Milliseconds of one call of `run`, of `calls` one after the other.
template <class F> double TimeOf(const Context& context, int calls, F&& run) {
  EventTimer& timer = EventTimerOf(context.device);
  void *begin = timer.Create(), *end = timer.Create();
  timer.Record(context, begin);
  for (int i = 0; i < calls; ++i) run();
  timer.Record(context, end);
  DeviceOf(context.device).Synchronize(context);
  return timer.MillisecondsBetween(begin, end) / calls;
}

}  // namespace

DeviceLimits MeasureLimits(const Context& context) {
  Device& device = DeviceOf(context.device);
  const bool gpu = context.device == DeviceType::kCuda;
  const DType dtype = gpu ? DType::kBF16 : DType::kF32;
  const int64_t n = gpu ? 8192 : 512, copied = gpu ? int64_t{512} << 20 : int64_t{32} << 20;
  const int warm = gpu ? 200 : 2, calls = gpu ? 50 : 4;
  void* const memory = device.Allocate(static_cast<size_t>(std::max(2 * copied, 3 * n * n * 4)), "measured limits");
  device.Zero(context, memory, static_cast<size_t>(2 * copied));
  DeviceLimits limits;
  char* const bytes = static_cast<char*>(memory);
  const auto copy = [&] { device.CopyOnDevice(context, bytes, bytes + copied, static_cast<size_t>(copied)); };
  TimeOf(context, 2, copy);
  limits.copy_bytes_per_ms = 2.0 * static_cast<double>(copied) / TimeOf(context, 20, copy);
  // Values matter for the power that a product draws: a pattern of small numbers of both signs.
  std::vector<uint16_t> pattern(static_cast<size_t>(n * n * static_cast<int64_t>(SizeOf(dtype)) / 2));
  uint32_t state = 1;
  for (uint16_t& x : pattern) {
    state = state * 1664525u + 1013904223u;
    x = ToBFloat16(static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f).bits;
  }
  const auto matrix = [&](int64_t place) { return Matrix{bytes + place * n * n * 4, dtype, n, n, n}; };
  for (int64_t place = 0; place < 2; ++place) {
    device.CopyToDevice(context, matrix(place).data, pattern.data(), pattern.size() * sizeof(uint16_t));
  }
  const auto product = [&] { Gemm(context, matrix(0), matrix(1), matrix(2), {.transpose_b = true}); };
  TimeOf(context, warm, product);
  limits.operations_per_ms = 2.0 * static_cast<double>(n * n * n) / TimeOf(context, calls, product);
  device.Free(memory);
  return limits;
}

OperatorProfile::OperatorProfile(const Context& context, const DeviceLimits& limits)
    : context_(context), limits_(limits), timer_(EventTimerOf(context.device)) {
  if (g_profile != nullptr) ThrowEngineError("two operator profiles at once");
  g_profile = this;
  SetHooks(context_.device, true);
}

OperatorProfile::~OperatorProfile() {
  SetHooks(context_.device, false);
  g_profile = nullptr;
}

int OperatorProfile::NewEvent() {
  if (used_events_ == static_cast<int>(events_.size())) events_.push_back(timer_.Create());
  timer_.Record(context_, events_[used_events_]);
  return used_events_++;
}

void OperatorProfile::Begin(const Context& context, const ProfiledOperator& op, const ProfiledArgument* arguments, int count) {
  if (context.device != context_.device || context.stream != context_.stream || depth_++ > 0) return;
  if (iteration_ < kWarmIterations) return;
  const auto line = lines_.try_emplace({op.group, NameOf(op, arguments)}).first;
  calls_.push_back({&line->first, OperationsOf(op, arguments), BytesOf(op, arguments, count), NewEvent(), -1});
}

void OperatorProfile::End(const Context& context) {
  if (context.device != context_.device || context.stream != context_.stream || --depth_ > 0) return;
  if (iteration_ >= kWarmIterations && !calls_.empty()) calls_.back().end = NewEvent();
}

void OperatorProfile::Collect() {
  DeviceOf(context_.device).Synchronize(context_);
  for (size_t i = 0; i < calls_.size(); ++i) {
    const Call& call = calls_[i];
    Line& line = lines_.at(*call.key);
    ++line.calls;
    line.milliseconds += timer_.MillisecondsBetween(events_[call.begin], events_[call.end]);
    line.operations += call.operations;
    line.bytes += call.bytes;
    if (i > 0) between_ += timer_.MillisecondsBetween(events_[calls_[i - 1].end], events_[call.begin]);
  }
  calls_.clear();
  used_events_ = 0;
}

void OperatorProfile::NextIteration() {
  if (iteration_++ >= kWarmIterations) {
    Collect();
    ++counted_;
  }
}

std::string OperatorProfile::Table() {
  if (counted_ == 0) return fmt::format("operator profile: no iteration after the first {}\n", kWarmIterations);
  std::map<std::string, Line> groups;
  Line all{.milliseconds = between_};
  const auto add = [](const Line& line, Line* sum) {
    sum->calls += line.calls;
    sum->milliseconds += line.milliseconds;
    sum->operations += line.operations;
    sum->bytes += line.bytes;
  };
  for (const auto& [key, line] : lines_) {
    add(line, &groups[key[0]]);
    add(line, &all);
  }
  const double iterations = static_cast<double>(counted_);
  const auto row = [&](const std::string& name, const Line& line) {
    const double ms = line.milliseconds / iterations;
    std::string text = fmt::format("{:<64} {:>7} {:>10.3f} {:>6.1f} %", name, line.calls / counted_, ms,
                                   100 * line.milliseconds / std::max(all.milliseconds, 1e-9));
    const double limit = std::max(line.operations / limits_.operations_per_ms, line.bytes / limits_.copy_bytes_per_ms);
    if (limit > 0) {
      text += fmt::format(" {:>10.3f} {:>5.0f} %", limit / iterations, 100 * limit / std::max(line.milliseconds, 1e-9));
      text += line.operations > 0 ? fmt::format("  {:.0f} TFLOP/s", line.operations / line.milliseconds / 1e9)
                                  : fmt::format("  {:.0f} GB/s", line.bytes / line.milliseconds / 1e6);
    }
    return text + "\n";
  };
  const auto by_time = [](auto& rows) {
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.milliseconds > b.second.milliseconds; });
  };
  std::string text = fmt::format(
      "operator profile: mean of {} iterations, {:.3f} ms in each with its events; limits of this process: {:.0f} TFLOP/s, copy "
      "{:.0f} GB/s\n{:<64} {:>7} {:>10} {:>8} {:>10} {:>7}\n",
      counted_, all.milliseconds / iterations, limits_.operations_per_ms / 1e9, limits_.copy_bytes_per_ms / 1e6, "class", "calls",
      "ms", "share", "limit ms", "of it");
  std::vector<std::pair<std::string, Line>> sorted(groups.begin(), groups.end());
  sorted.emplace_back("between these operators", Line{.milliseconds = between_});
  by_time(sorted);
  for (const auto& [name, line] : sorted) text += row(name, line);
  std::vector<std::pair<std::string, Line>> single;
  for (const auto& [key, line] : lines_) {
    if (line.calls > 0) single.emplace_back(key[1], line);
  }
  by_time(single);
  text += "\n";
  for (const auto& [name, line] : single) text += row(name, line);
  return text;
}

}  // namespace mbridge
