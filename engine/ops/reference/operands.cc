#include "engine/ops/reference/operands.h"

#include <algorithm>

namespace mbridge::test {
namespace {

std::byte* BytesAt(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

// From the first element of the first row to the last of the last.
size_t ElementsOf(int64_t rows, int64_t cols, int64_t stride) {
  return rows == 0 || cols == 0 ? 0 : static_cast<size_t>((rows - 1) * stride + cols);
}

}  // namespace

void Operands::Add(Tensor& tensor) {
  if (tensor.empty()) return;
  places_.push_back({BytesAt(tensor.data), tensor.bytes(), tensor.dtype, [&tensor](void* data, DeviceType device) {
                       tensor.data = data;
                       tensor.device = device;
                     }});
}

void Operands::Add(std::vector<Tensor>& tensors) {
  for (Tensor& tensor : tensors) Add(tensor);
}

void Operands::Add(Matrix& matrix) {
  if (matrix.data == nullptr) return;
  places_.push_back({BytesAt(matrix.data), ElementsOf(matrix.rows, matrix.cols, matrix.stride) * SizeOf(matrix.dtype),
                     matrix.dtype, [&matrix](void* data, DeviceType) { matrix.data = data; }});
}

void Operands::Add(Fp8Matrix& m) {
  if (m.data != nullptr) {
    places_.push_back(
        {BytesAt(m.data), ElementsOf(m.rows, m.cols, m.stride), DType::kU8, [&m](void* data, DeviceType) { m.data = data; }});
  }
  if (m.inverse_scale != nullptr) {
    places_.push_back({BytesAt(m.inverse_scale), static_cast<size_t>(Fp8ScaleCount(m.scaling, m.rows, m.cols)) * sizeof(float),
                       DType::kF32, [&m](void* data, DeviceType) { m.inverse_scale = static_cast<const float*>(data); }});
  }
}

void Operands::Add(AttentionSinks& sinks) {
  auto& [scores, probabilities, gradient] = sinks;
  Add(scores);
  Add(probabilities);
  Add(gradient);
}

void Operands::Add(AttentionOptions& options) {
  auto& [seq_length, batch, heads, groups, head_size, value_size, scale, soft_cap, window, dropout, softmax_in_fp32, precision,
         sinks] = options;
  Add(precision);
  Add(sinks);
}

void Operands::Add(NormOptions& options) {
  auto& [epsilon, gamma_offset, precision, amax] = options;
  Add(precision);
  Add(amax);
}

void Operands::Add(QkNormOptions& options) {
  auto& [layout, scope, norm, sums, ranks] = options;
  Add(norm);
  Add(sums);
}

void Operands::Add(CrossEntropyState& state) {
  auto& [maximum, sum, predicted] = state;
  Add(maximum);
  Add(sum);
  Add(predicted);
}

void Operands::Add(ExpertRows& rows) {
  auto& [offsets, slots, places] = rows;
  Add(offsets);
  Add(slots);
  Add(places);
}

void Operands::Add(ExpertActivationOptions& options) {
  auto& [gate, clamp, linear_offset, fused, precision, router_precision] = options;
  Add(precision);
}

void Operands::Add(RouterOptions& options) {
  auto& [score, topk, groups, group_topk, group_experts, scaling, precision] = options;
  Add(precision);
}

void Operands::Add(RouterAuxiliary& auxiliary) {
  auto& [slopes, z_slope] = auxiliary;
  Add(slopes);
}

void Operands::Add(MaskPosition& position) {
  auto& [stream, device_words] = position;
  if (device_words == nullptr) return;
  places_.push_back({BytesAt(device_words), 2 * sizeof(uint64_t), DType::kI64,
                     [&position](void* data, DeviceType) { position.device_words = static_cast<const uint64_t*>(data); }});
}

bool Operands::EmulateANarrowType() const {
  const auto is_narrow = [](DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; };
  const auto values = std::find_if(places_.begin(), places_.end(),
                                   [&](const Place& place) { return place.dtype == DType::kF32 || is_narrow(place.dtype); });
  return values != places_.end() && values->dtype == DType::kF32 &&
         std::any_of(precisions_.begin(), precisions_.end(), is_narrow);
}

}  // namespace mbridge::test
