// CPU twins replaced by calls of another function on mirrored operands, so that tests written for the CPU twins test that one.
#pragma once

#include <atomic>
#include <span>
#include <string>
#include <tuple>

#include "engine/ops/reference/mirror.h"

namespace mbridge::test {

// What became of the calls of one operator.
struct OperatorUse {
  std::string name;
  int64_t on_device = 0;
  int64_t on_cpu = 0;   // Refused on the device because a narrow type is emulated.
  int64_t refused = 0;  // Refused for another reason: the caller's exception.
};

// Arguments as they are kept while their memory is elsewhere.
template <class T> struct Kept {
  using Type = std::decay_t<T>;
  static Type Of(const Type& value) { return value; }
};
template <> struct Kept<std::span<const Tensor>> {
  using Type = std::vector<Tensor>;
  static Type Of(std::span<const Tensor> tensors) { return {tensors.begin(), tensors.end()}; }
};

// CUDA needs another amount than the CPU. A workspace that the CPU is content with is replaced by one of CUDA's size, which lives
// as long as the result; one that is too small stays.
std::vector<std::byte> FitWorkspace(const AttentionOptions& options, DType storage, DeviceType device, Tensor& workspace);

// Operators call others, also from OpenMP threads; those calls are none of the test's.
class OutermostCall {
 public:
  OutermostCall() : outermost_(!inside_.exchange(true)) {}
  ~OutermostCall() {
    if (outermost_) inside_ = false;
  }
  OutermostCall(const OutermostCall&) = delete;
  OutermostCall& operator=(const OutermostCall&) = delete;
  explicit operator bool() const { return outermost_; }

 private:
  inline static std::atomic<bool> inside_ = false;
  const bool outermost_;
};

template <auto& kOp, class Operator = std::remove_reference_t<decltype(kOp)>> class OnDevice;

template <auto& kOp, class... Args> class OnDevice<kOp, Op<void(const Context&, Args...)>> {
 public:
  using Function = typename Op<void(const Context&, Args...)>::Function;

  // From now on `kOp.cpu` runs `function` in `context`. `use` lives as long as the program. kOp.cuda is taken away: nothing may
  // give it the host's tensors.
  static void Install(Function function, const Context& context, OperatorUse* use) {
    cpu_ = kOp.cpu;
    function_ = function;
    context_ = context;
    use_ = use;
    kOp.cpu = &Call;
    kOp.cuda = nullptr;
  }

 private:
  static void Call(const Context& context, Args... args) {
    const OutermostCall outermost;
    if (!outermost) return cpu_(context, args...);
    if (RunOnDevice(args...)) {
      ++use_->on_device;
    } else {
      cpu_(context, args...);
      ++use_->on_cpu;
    }
  }

  // False: a narrow type that the CPU emulates was refused.
  static bool RunOnDevice(const Args&... args) {
    auto kept = std::tuple<typename Kept<Args>::Type...>{Kept<Args>::Of(args)...};
    std::vector<std::byte> workspace;
    if constexpr ((std::is_same_v<typename Kept<Args>::Type, AttentionOptions> || ...)) {
      workspace = FitWorkspace(std::get<AttentionOptions>(kept), std::get<0>(kept).dtype, context_.device,
                               std::get<sizeof...(Args) - 1>(kept));
    }
    Operands operands;
    std::apply([&](auto&... values) { (operands.Add(values), ...); }, kept);
    Mirror mirror(context_, operands.places());
    try {
      std::apply([](const auto&... values) { function_(context_, values...); }, kept);
    } catch (const EngineError&) {
      if (operands.EmulateANarrowType()) return false;
      ++use_->refused;
      throw;
    }
    mirror.CopyBack();
    return true;
  }

  inline static Function cpu_ = nullptr, function_ = nullptr;
  inline static Context context_;
  inline static OperatorUse* use_ = nullptr;
};

}  // namespace mbridge::test
