#include "engine/core/parameter.h"

#include "engine/core/device.h"

namespace mbridge {
namespace {

// 32 elements: 64 bytes of BF16, so that values and gradients share element offsets.
constexpr int64_t kAlignElements = 32;

}  // namespace

int ParameterStore::Add(ParameterSpec spec) {
  if (!values_.empty()) ThrowEngineError("parameter {} declared after Allocate", spec.name);
  parameters_.push_back({std::move(spec), {}, {}});
  return static_cast<int>(parameters_.size()) - 1;
}

void ParameterStore::Allocate(int64_t spare) {
  int64_t total = 0, state = 0;  // Elements of the buffers, of what is not trainable.
  std::vector<int64_t> offsets;
  for (const Parameter& parameter : parameters_) {
    int64_t* end = parameter.spec.trainable ? &total : &state;
    offsets.push_back(*end);
    *end += (parameter.spec.shape.NumElements() + kAlignElements - 1) / kAlignElements * kAlignElements;
  }
  capacity_ = total + spare;
  value_memory_ = AllocateZeroed(device_, static_cast<size_t>(capacity_) * SizeOf(dtype_), "weights");
  grad_memory_ = AllocateZeroed(device_, static_cast<size_t>(capacity_) * sizeof(float), "gradients");
  if (state > 0) state_memory_ = AllocateZeroed(device_, static_cast<size_t>(state) * sizeof(float), "expert biases");
  values_ = {value_memory_.get(), dtype_, device_, {total}};
  grads_ = {grad_memory_.get(), DType::kF32, device_, {total}};
  const Tensor states{state_memory_.get(), DType::kF32, device_, {state}};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const int64_t count = parameter.spec.shape.NumElements();
    const Tensor& values = parameter.spec.trainable ? values_ : states;
    parameter.value = values.Rows(offsets[i], count).View(parameter.spec.shape);
    if (parameter.spec.trainable) parameter.main_grad = grads_.Rows(offsets[i], count).View(parameter.spec.shape);
  }
}

int ParameterStore::Find(std::string_view name) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].spec.name == name) return static_cast<int>(i);
  }
  return -1;
}

int64_t ParameterStore::PlannedElements() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) {
    if (parameter.spec.trainable)
      total += (parameter.spec.shape.NumElements() + kAlignElements - 1) / kAlignElements * kAlignElements;
  }
  return total;
}

int64_t ParameterStore::NumElements() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) {
    if (parameter.spec.trainable) total += parameter.spec.shape.NumElements();
  }
  return total;
}

int64_t ParameterStore::NumGlobalElements() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) {
    if (parameter.spec.trainable) total += parameter.spec.global_shape.NumElements();
  }
  return total;
}

void ParameterStore::ZeroGradients(const Context& context) { DeviceOf(device_).Zero(context, grads_.data, grads_.bytes()); }

}  // namespace mbridge
