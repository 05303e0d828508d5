#include "engine/core/event_timer.h"

#include <chrono>
#include <deque>

namespace mbridge {
namespace {

class CpuTimer : public EventTimer {
 public:
  void* Create() override { return &events_.emplace_back(); }
  void Record(const Context&, void* event) override { *static_cast<Clock::time_point*>(event) = Clock::now(); }
  double MillisecondsBetween(void* begin, void* end) override {
    const std::chrono::duration<double, std::milli> passed =
        *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return passed.count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::deque<Clock::time_point> events_;
};

EventTimer* g_cuda = nullptr;

}  // namespace

EventTimer& EventTimerOf(DeviceType type) {
  static CpuTimer cpu;
  if (type == DeviceType::kCpu) return cpu;
  if (g_cuda == nullptr) ThrowEngineError("this program was built without CUDA");
  return *g_cuda;
}

void RegisterEventTimer(EventTimer* cuda) { g_cuda = cuda; }

}  // namespace mbridge
