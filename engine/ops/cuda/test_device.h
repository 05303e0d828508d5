// For the CUDA twins' tests: tensors copied to the GPU and back, and a context to run in.
#pragma once

#include <gtest/gtest.h>

#include "engine/core/cuda/check.h"
#include "engine/core/device.h"
#include "engine/ops/test_support.h"

namespace mbridge::test {

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// First line of a test that needs a GPU.
#define MB_NEEDS_GPU() \
  if (!::mbridge::test::HasGpu()) GTEST_SKIP() << "no GPU on this machine"

// A context with its own stream and workspace.
class Gpu {
 public:
  explicit Gpu(size_t workspace_bytes = size_t{64} << 20) {
    cudaStream_t stream;
    MB_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    context_ = {DeviceType::kCuda, stream, DeviceOf(DeviceType::kCuda).Allocate(workspace_bytes, "workspace"), workspace_bytes};
  }
  ~Gpu() {
    cudaStreamSynchronize(static_cast<cudaStream_t>(context_.stream));
    DeviceOf(DeviceType::kCuda).Free(context_.workspace);
    cudaStreamDestroy(static_cast<cudaStream_t>(context_.stream));
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  operator const Context&() const { return context_; }  // NOLINT(google-explicit-constructor): it stands for its context.
  const Context& context() const { return context_; }
  void Synchronize() const { DeviceOf(DeviceType::kCuda).Synchronize(context_); }

 private:
  Context context_;
};

// A tensor on the GPU. Memory that no values were given for is filled with NaN patterns, so that unwritten outputs are seen.
class OnGpu {
 public:
  OnGpu(DType dtype, const Shape& shape) {
    tensor_ = {DeviceOf(DeviceType::kCuda).Allocate(shape.NumElements() * SizeOf(dtype) + 256, "test"), dtype, DeviceType::kCuda,
               shape};
    MB_CUDA(cudaMemset(tensor_.data, 0xff, tensor_.bytes() + 256));
    MB_CUDA(cudaDeviceSynchronize());
  }
  OnGpu(DType dtype, const Shape& shape, const Values& values) : OnGpu(Owned(dtype, shape, values)) {}
  explicit OnGpu(const Owned& host) : OnGpu(host.tensor().dtype, host.tensor().shape) {
    MB_CUDA(cudaMemcpy(tensor_.data, host.tensor().data, tensor_.bytes(), cudaMemcpyHostToDevice));
    MB_CUDA(cudaDeviceSynchronize());  // From pageable memory the copy returns before its last part has arrived.
  }
  ~OnGpu() { DeviceOf(DeviceType::kCuda).Free(tensor_.data); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  operator const Tensor&() const { return tensor_; }  // NOLINT(google-explicit-constructor): it stands for its tensor.
  const Tensor& tensor() const { return tensor_; }
  // Waits for the whole device.
  Values ToValues() const {
    MB_CUDA(cudaDeviceSynchronize());
    Owned host(tensor_.dtype, tensor_.shape);
    MB_CUDA(cudaMemcpy(host.tensor().data, tensor_.data, tensor_.bytes(), cudaMemcpyDeviceToHost));
    return host.ToValues();
  }

 private:
  Tensor tensor_;
};

inline constexpr DType kGpuTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

}  // namespace mbridge::test
