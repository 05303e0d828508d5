// What the CUDA operators cannot train. The engine, the check at submit and mbctl say it in the same words.
#pragma once

#include <cstdint>
#include <string>

namespace mbridge {

// Parts and sizes of a model that CUDA operators limit.
struct CudaNeeds {
  bool gated_delta_net = false;
  bool attention_output_gate = false;
  bool mamba = false;
  bool mlp_gate_multiplier = false;
  int64_t moe_experts = 0;
  int64_t moe_topk = 0;
};

// Names the first part without a CUDA operator, and what to do; empty where a GPU trains all of it.
std::string WithoutCudaOperator(const CudaNeeds& needs);

}  // namespace mbridge
