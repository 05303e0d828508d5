#include "engine/core/event_timer.h"

#include "engine/core/cuda/check.h"

namespace mbridge::cuda {
namespace {

class CudaTimer : public EventTimer {
 public:
  void* Create() override {
    cudaEvent_t event = nullptr;
    MB_CUDA(cudaEventCreate(&event));
    return event;
  }
  void Record(const Context& context, void* event) override {
    MB_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(context.stream)));
  }
  double MillisecondsBetween(void* begin, void* end) override {
    float milliseconds = 0;
    MB_CUDA(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)));
    return milliseconds;
  }
};

CudaTimer g_timer;
const bool g_registered = (RegisterEventTimer(&g_timer), true);

}  // namespace
}  // namespace mbridge::cuda
