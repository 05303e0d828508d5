// The memory that an operator's arguments stand for, whatever they are made of.
#pragma once

#include <concepts>
#include <functional>
#include <type_traits>
#include <vector>

#include "engine/ops/attention.h"
#include "engine/ops/block_quantize.h"
#include "engine/ops/dropout_mask.h"
#include "engine/ops/expert_activation.h"
#include "engine/ops/fp8_gemm.h"
#include "engine/ops/gemm.h"
#include "engine/ops/logit_transform.h"
#include "engine/ops/mla_heads.h"
#include "engine/ops/moe_permute.h"
#include "engine/ops/rms_norm.h"
#include "engine/ops/router.h"
#include "engine/ops/vocab_cross_entropy.h"

namespace mbridge::test {

// Structs that hold no memory.
template <class T>
concept Plain = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::same_as<T, QkvLayout> || std::same_as<T, MlaLayout> ||
    std::same_as<T, GemmOptions> || std::same_as<T, Fp8GemmOptions> || std::same_as<T, Fp8ScaleOptions> ||
    std::same_as<T, BlockQuantizeOptions> || std::same_as<T, LogitTransform> || std::same_as<T, PhiloxStream>;

// Collects the arguments, which are the caller's to keep and will be moved. An argument of a type that is not known here does
// not compile, nor does a struct that has got another field.
class Operands {
 public:
  struct Place {
    std::byte* data;
    size_t bytes;
    DType dtype;
    std::function<void(void* data, DeviceType device)> move;
  };

  void Add(Tensor& tensor);
  void Add(std::vector<Tensor>& tensors);
  void Add(Matrix& matrix);
  void Add(Fp8Matrix& matrix);
  void Add(AttentionSinks& sinks);
  void Add(AttentionOptions& options);
  void Add(NormOptions& options);
  void Add(QkNormOptions& options);
  void Add(CrossEntropyState& state);
  void Add(ExpertRows& rows);
  void Add(ExpertActivationOptions& options);
  void Add(RouterOptions& options);
  void Add(RouterAuxiliary& auxiliary);
  void Add(MaskPosition& position);
  void Add(DType& precision) { precisions_.push_back(precision); }
  void Add(bool*&) {}  // An answer on the host.
  template <Plain T> void Add(T&) {}

  // In the order of the arguments, without those that are empty.
  const std::vector<Place>& places() const { return places_; }
  // Whether the values, which are the first operand of a floating type, are F32 and results rounded to a 16-bit type: the CPU
  // twins' way to emulate it, which CUDA mostly does without.
  bool EmulateANarrowType() const;

 private:
  std::vector<Place> places_;
  std::vector<DType> precisions_;
};

}  // namespace mbridge::test
