// Element types and the exact conversions between them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mbridge {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kI32, kI64, kU8 };

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kU8: return 1;
  }
  return 0;
}

// "F32", "BF16", …: the names of safetensors.
constexpr std::string_view NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "F32";
    case DType::kBF16: return "BF16";
    case DType::kF16: return "F16";
    case DType::kF64: return "F64";
    case DType::kI32: return "I32";
    case DType::kI64: return "I64";
    case DType::kU8: return "U8";
  }
  return "?";
}

// Storage types; arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline BFloat16 ToBFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// IEEE binary16, round to nearest even, overflow to infinity, subnormals kept.
inline float ToFloat(Float16 x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline Float16 ToFloat16(float x) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))}; }

template <class T> T FromFloat(float x);
template <> inline float FromFloat<float>(float x) { return x; }
template <> inline BFloat16 FromFloat<BFloat16>(float x) { return ToBFloat16(x); }
template <> inline Float16 FromFloat<Float16>(float x) { return ToFloat16(x); }

template <class T> constexpr DType kDTypeOf = DType::kU8;
template <> inline constexpr DType kDTypeOf<float> = DType::kF32;
template <> inline constexpr DType kDTypeOf<BFloat16> = DType::kBF16;
template <> inline constexpr DType kDTypeOf<Float16> = DType::kF16;
template <> inline constexpr DType kDTypeOf<double> = DType::kF64;
template <> inline constexpr DType kDTypeOf<int32_t> = DType::kI32;
template <> inline constexpr DType kDTypeOf<int64_t> = DType::kI64;
template <> inline constexpr DType kDTypeOf<uint8_t> = DType::kU8;

}  // namespace mbridge
