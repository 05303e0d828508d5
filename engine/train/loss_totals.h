// An iteration's losses over all ranks, summed on the device, so that the host waits once for all that it wants to know.
#pragma once

#include <memory>

#include "engine/comm/communicator.h"
#include "engine/core/device.h"
#include "engine/model/gpt_model.h"

namespace mbridge {

class LossTotals {
 public:
  // `context` is the model's; it and `world` outlive this. Throws REASON_OUT_OF_MEMORY.
  LossTotals(const Context& context, Communicator* world);

  // Takes the model's sums since they were last taken and enqueues their sums over the ranks, and that of `stop`. Every rank
  // calls it, and waits for the context's stream before it reads the results or calls again.
  void Sum(GptModel* model, bool stop);

  // Tensor-parallel ranks have equal sums: they change neither quotient nor wish.
  double MeanLoss() const { return host_[0] / host_[1]; }
  bool StopRequested() const { return host_[2] > 0; }

 private:
  Context context_;
  Communicator* world_;
  Device& device_;
  std::shared_ptr<void> memory_, host_memory_;
  Tensor totals_;           // F64 [3]: loss * mask, mask, ranks that want to stop.
  double* host_ = nullptr;  // Page-locked: totals_, then what this rank adds to the last.
};

}  // namespace mbridge
