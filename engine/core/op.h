// An operator with twins: one signature, an implementation per device, chosen by the device of the caller's context.
//
// x.h declares `extern Op<Signature> LayerNormForward;` with the contract, cpu/x.cc defines it with the CPU twin, cuda/x.cu
// registers the CUDA twin. Tests call `.cpu` and `.cuda` directly and compare them.
#pragma once

#include "engine/core/tensor.h"

namespace mbridge {

// Where an operator runs. `stream` is a cudaStream_t on CUDA, unused on the CPU (OpenMP threads of the calling thread).
// `workspace` is CUDA scratch that operators of one stream use one after another: what an operator leaves there is lost.
struct Context {
  DeviceType device = DeviceType::kCpu;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

template <class Signature> class Op;

template <class... Args> class Op<void(const Context&, Args...)> {
 public:
  using Function = void (*)(const Context&, Args...);
  constexpr explicit Op(Function cpu_function) : cpu(cpu_function) {}
  void operator()(const Context& context, Args... args) const {
    Function function = context.device == DeviceType::kCpu ? cpu : cuda;
    if (function == nullptr) ThrowEngineError("operator has no implementation for this device");
    function(context, args...);
  }
  Function cpu = nullptr;
  Function cuda = nullptr;
};

}  // namespace mbridge
