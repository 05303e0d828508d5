#include "engine/ops/attention_sinks.h"

namespace mbridge {

Op<void(const Context&, const AttentionSinks&, const Tensor&, const Tensor&)> AddSinksToFlash{nullptr};
Op<void(const Context&, const Tensor&, const Tensor&, DType, const AttentionSinks&)> FlashSinkGradients{nullptr};

}  // namespace mbridge
