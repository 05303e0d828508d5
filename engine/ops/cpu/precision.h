// The CPU twins' view of a model dtype: how a value is stored and where it is rounded.
//
// Without BF16 products in hardware, BF16 and F16 activations are carried in F32 storage: every stored value is representable in
// the narrow type, so results have the same bits as with narrow storage and products need no conversion. "Precision" is the type
// whose rounding applies; "storage" is the tensor's dtype. Products may leave unrounded F32 values; consumers round on read.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/core/dtype.h"
#include "engine/core/error.h"

namespace mbridge::cpu {

// Branch-free forms, so that loops vectorise.
inline float RoundToBF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return std::bit_cast<float>((x != x ? bits | 0x00400000u : rounded) & 0xffff0000u);
}
inline BFloat16 NarrowToBF16(float x) { return {static_cast<uint16_t>(std::bit_cast<uint32_t>(RoundToBF16(x)) >> 16)}; }

struct F32 {
  using Storage = float;
  static constexpr DType kPrecision = DType::kF32;
  static float Load(float x) { return x; }
  static float Round(float x) { return x; }
  static float Store(float x) { return x; }
};

struct BF16InF32 {
  using Storage = float;
  static constexpr DType kPrecision = DType::kBF16;
  static float Load(float x) { return RoundToBF16(x); }
  static float Round(float x) { return RoundToBF16(x); }
  static float Store(float x) { return RoundToBF16(x); }
};

struct F16InF32 {
  using Storage = float;
  static constexpr DType kPrecision = DType::kF16;
  static float Load(float x) { return Round(x); }
  static float Round(float x) { return ToFloat(ToFloat16(x)); }
  static float Store(float x) { return Round(x); }
};

struct BF16 {
  using Storage = BFloat16;
  static constexpr DType kPrecision = DType::kBF16;
  static float Load(BFloat16 x) { return ToFloat(x); }
  static float Round(float x) { return RoundToBF16(x); }
  static BFloat16 Store(float x) { return NarrowToBF16(x); }
};

// Calls f with one of the four types above. Throws for a combination that is none of them.
template <class F> void WithPrecision(DType storage, DType precision, F&& f) {
  if (storage == DType::kF32 && precision == DType::kF32) return f(F32());
  if (storage == DType::kF32 && precision == DType::kBF16) return f(BF16InF32());
  if (storage == DType::kF32 && precision == DType::kF16) return f(F16InF32());
  if (storage == DType::kBF16 && precision == DType::kBF16) return f(BF16());
  ThrowEngineError("no CPU operator for {} values rounded to {}", NameOf(storage), NameOf(precision));
}

// The compact type that holds values of a precision: what saved probabilities and logits are kept in.
template <DType precision> struct CompactOf;
template <> struct CompactOf<DType::kF32> { using Type = float; };
template <> struct CompactOf<DType::kBF16> { using Type = BFloat16; };
template <> struct CompactOf<DType::kF16> { using Type = Float16; };

template <class T> T Narrow(float x);
template <> inline float Narrow<float>(float x) { return x; }
template <> inline BFloat16 Narrow<BFloat16>(float x) { return NarrowToBF16(x); }
template <> inline Float16 Narrow<Float16>(float x) { return ToFloat16(x); }

}  // namespace mbridge::cpu
