// Where the time of a training step goes, by operator, each against its limit: the matrix product rate or the copy bandwidth that
// the same process measured on the same device right before.
#pragma once

#include <array>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/event_timer.h"

namespace mbridge {

// What a device reaches when it does nothing else.
struct DeviceLimits {
  double operations_per_ms = 0;  // Of a large BF16 product (F32 on the CPU), one after the other until clocks have settled.
  double copy_bytes_per_ms = 0;  // Read and written.
};

// What a profile sees of an argument: of a tensor or matrix its sizes, of others only the address.
struct ProfiledArgument {
  const void* address = nullptr;  // Of the argument itself, for those who know the operator's signature.
  int64_t rows = 0, cols = 0;     // cols: the last dimension; 0 for an empty tensor and for what is no tensor.
  DType dtype = DType::kF32;

  int64_t bytes() const { return rows * cols * static_cast<int64_t>(SizeOf(dtype)); }
};

struct ProfiledOperator;

// Takes about a second and 1 GiB of the device's memory, which it gives back.
DeviceLimits MeasureLimits(const Context& context);

// While it lives it stands in the place of the operators' implementations on the context's device and times each call with two
// events. Not with CUDA graphs. One at a time; the calling thread runs the operators.
class OperatorProfile {
 public:
  OperatorProfile(const Context& context, const DeviceLimits& limits);
  ~OperatorProfile();
  OperatorProfile(const OperatorProfile&) = delete;
  OperatorProfile& operator=(const OperatorProfile&) = delete;

  // Whether a call there is timed: not one of another stream or thread, which goes on beside the others.
  bool Sees(const Context& context) const { return context.stream == context_.stream && std::this_thread::get_id() == thread_; }
  // Around a call of an operator; operators may call operators.
  void Begin(const Context& context, const ProfiledOperator& op, const ProfiledArgument* arguments, int count);
  void End(const Context& context);

  // Between two iterations. Those before the fourth are forgotten: they choose algorithms and warm up.
  void NextIteration();
  // Milliseconds of an iteration by class and by operator, the rest as "between these operators". Waits for the device.
  std::string Table();

 private:
  // Operators of one kind and shape.
  struct Line {
    int64_t calls = 0;
    double milliseconds = 0, operations = 0, bytes = 0;
  };
  using Key = std::array<std::string, 2>;  // Class, operator.
  struct Call {
    const Key* key;
    double operations, bytes;
    int begin, end;  // Events.
  };

  int NewEvent();
  void Collect();

  const Context context_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const DeviceLimits limits_;
  EventTimer& timer_;
  std::vector<void*> events_;
  int used_events_ = 0, depth_ = 0;
  int64_t iteration_ = 0;
  std::vector<Call> calls_;
  std::map<Key, Line> lines_;
  double between_ = 0;
  int64_t counted_ = 0;
};

}  // namespace mbridge
