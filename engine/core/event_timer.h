// Events of a stream with times, for measurements.
#pragma once

#include "engine/core/op.h"

namespace mbridge {

class EventTimer {
 public:
  virtual ~EventTimer() = default;
  // An event; kept for the life of the process.
  virtual void* Create() = 0;
  // In stream order on CUDA, at once on the CPU.
  virtual void Record(const Context& context, void* event) = 0;
  // Between two events that the stream has passed.
  virtual double MillisecondsBetween(void* begin, void* end) = 0;
};

// Throws EngineError for a device that this program was built without.
EventTimer& EventTimerOf(DeviceType type);
// Called once by the CUDA code when it is linked in.
void RegisterEventTimer(EventTimer* cuda);

}  // namespace mbridge
