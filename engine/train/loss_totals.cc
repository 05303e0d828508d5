#include "engine/train/loss_totals.h"

namespace mbridge {

LossTotals::LossTotals(const Context& context, Communicator* world)
    : context_(context), world_(world), device_(DeviceOf(context.device)) {
  constexpr int64_t kTotals = 3;
  memory_ = AllocateZeroed(context.device, kTotals * sizeof(double), "the totals of losses");
  totals_ = {memory_.get(), DType::kF64, context.device, {kTotals}};
  host_memory_ = {device_.AllocateHost((kTotals + 1) * sizeof(double)),
                  [device = &device_](void* memory) { device->FreeHost(memory); }};
  host_ = static_cast<double*>(host_memory_.get());
}

void LossTotals::Sum(GptModel* model, bool stop) {
  model->MoveLossSum(totals_.Rows(0, 2));
  host_[3] = stop ? 1.0 : 0.0;
  device_.CopyToDevice(context_, totals_.Rows(2, 1).data, host_ + 3, sizeof(double));
  world_->AllReduce(totals_, ReduceOp::kSum);
  device_.CopyToHost(context_, host_, totals_.data, totals_.bytes());
}

}  // namespace mbridge
