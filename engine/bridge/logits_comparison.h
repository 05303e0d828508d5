// The logits of a checkpoint against those that another program computed from the same weights.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Computes the model in FP32 on the CPU. `path`: safetensors with input_ids I64 [b, s] and logits F32 [b, s, vocab_size]. Returns
// the largest difference as a share of the largest logit, infinity where one is not finite. INVALID_ARGUMENT names what is wrong
// with the file or the model.
absl::StatusOr<double> CompareLogits(const std::string& path, const std::string& checkpoint, const std::string& manifest_hash,
                                     const GptConfig& config, int64_t vocab_size);

}  // namespace mbridge
