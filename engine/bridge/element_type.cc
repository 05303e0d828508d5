#include "engine/bridge/element_type.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace mbridge {
namespace {

bool IsFloat(DType dtype) { return dtype != DType::kI32 && dtype != DType::kI64 && dtype != DType::kU8; }

struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

template <float (*kValue)(uint8_t)> std::array<float, 256> TableOf() {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[i] = kValue(static_cast<uint8_t>(i));
  return table;
}

// Sign, exponent and mantissa as a number; no special values.
float Assemble(uint8_t bits, int mantissa_bits, int exponent_bits, int bias) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1), exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const float size = exponent == 0
                         ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                         : std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  return (bits & 0x80) != 0 ? -size : size;
}

double Value(double x) { return x; }
float Value(float x) { return x; }
float Value(BFloat16 x) { return ToFloat(x); }
float Value(Float16 x) { return ToFloat(x); }
float Value(E4M3 x) {
  static const std::array<float, 256> kTable = TableOf<FromE4M3>();
  return kTable[x.bits];
}
float Value(E5M2 x) {
  static const std::array<float, 256> kTable = TableOf<FromE5M2>();
  return kTable[x.bits];
}

// The nearest value of an 8-bit float, ties to even; too large ones become the largest (E4M3) or infinity (E5M2).
uint8_t ToEightBits(float x, float (*value)(uint8_t), uint8_t largest, uint8_t above, uint8_t nan) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint8_t>(sign | nan);
  uint8_t low = 0, high = largest;
  if (size >= value(largest)) {
    // Half a step above the largest is where rounding leaves the range.
    const float step = value(largest) - value(static_cast<uint8_t>(largest - 1));
    return static_cast<uint8_t>(sign | (size >= value(largest) + step / 2 ? above : largest));
  }
  while (high - low > 1) {
    const auto middle = static_cast<uint8_t>((low + high) / 2);
    (value(middle) <= size ? low : high) = middle;
  }
  const float down = size - value(low), up = value(high) - size;
  const bool take_low = down < up || (down == up && low % 2 == 0);
  return static_cast<uint8_t>(sign | (take_low ? low : high));
}

template <class T> T Narrow(double x) { return FromFloat<T>(static_cast<float>(x)); }
template <> E4M3 Narrow<E4M3>(double x) { return {ToEightBits(static_cast<float>(x), FromE4M3, 0x7e, 0x7e, 0x7f)}; }
template <> E5M2 Narrow<E5M2>(double x) { return {ToEightBits(static_cast<float>(x), FromE5M2, 0x7b, 0x7c, 0x7e)}; }

template <class From, class To> void Loop(const void* from, void* into, int64_t count) {
  const From* source = static_cast<const From*>(from);
  To* target = static_cast<To*>(into);
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<To, double>)
      target[i] = Value(source[i]);
    else if constexpr (std::is_same_v<From, double> || std::is_same_v<To, E4M3> || std::is_same_v<To, E5M2>)
      target[i] = Narrow<To>(Value(source[i]));
    else
      target[i] = FromFloat<To>(Value(source[i]));
  }
}

template <class From> bool ToOurs(const void* from, DType to, void* into, int64_t count) {
  switch (to) {
    case DType::kF32: Loop<From, float>(from, into, count); return true;
    case DType::kBF16: Loop<From, BFloat16>(from, into, count); return true;
    case DType::kF16: Loop<From, Float16>(from, into, count); return true;
    case DType::kF64: Loop<From, double>(from, into, count); return true;
    default: return false;
  }
}

template <class To> bool FromOurs(DType from_type, const void* from, void* into, int64_t count) {
  switch (from_type) {
    case DType::kF32: Loop<float, To>(from, into, count); return true;
    case DType::kBF16: Loop<BFloat16, To>(from, into, count); return true;
    case DType::kF16: Loop<Float16, To>(from, into, count); return true;
    case DType::kF64: Loop<double, To>(from, into, count); return true;
    default: return false;
  }
}

}  // namespace

std::optional<DType> ExactType(std::string_view dtype) {
  for (const DType own : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32, DType::kI64, DType::kU8}) {
    if (NameOf(own) == dtype) return own;
  }
  if (dtype == "F8_E4M3" || dtype == "F8_E5M2") return DType::kBF16;
  return std::nullopt;
}

std::optional<DType> WiderType(DType a, DType b) {
  if (a == b) return a;
  if (!IsFloat(a) || !IsFloat(b)) return std::nullopt;
  return a == DType::kF64 || b == DType::kF64 ? DType::kF64 : DType::kF32;  // Of BF16 and F16 neither holds the other.
}

float FromE4M3(uint8_t bits) { return (bits & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN() : Assemble(bits, 3, 4, 7); }

float FromE5M2(uint8_t bits) {
  if ((bits & 0x7c) != 0x7c) return Assemble(bits, 2, 5, 15);
  if ((bits & 3) != 0) return std::numeric_limits<float>::quiet_NaN();
  return (bits & 0x80) != 0 ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
}

float FromE8M0(uint8_t bits) {
  return bits == 0xff ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(std::ldexp(1.0, bits - 127));
}

bool ConvertElements(std::string_view from_dtype, const void* from, DType to, void* into, int64_t count) {
  if (from_dtype == NameOf(to)) {
    std::memcpy(into, from, static_cast<size_t>(count) * SizeOf(to));
    return true;
  }
  if (from_dtype == "F8_E4M3") return ToOurs<E4M3>(from, to, into, count);
  if (from_dtype == "F8_E5M2") return ToOurs<E5M2>(from, to, into, count);
  if (from_dtype == "F32") return ToOurs<float>(from, to, into, count);
  if (from_dtype == "BF16") return ToOurs<BFloat16>(from, to, into, count);
  if (from_dtype == "F16") return ToOurs<Float16>(from, to, into, count);
  return from_dtype == "F64" && ToOurs<double>(from, to, into, count);
}

bool ConvertToFormat(DType from_type, const void* from, std::string_view to_dtype, void* into, int64_t count) {
  if (to_dtype == NameOf(from_type)) {
    std::memcpy(into, from, static_cast<size_t>(count) * SizeOf(from_type));
    return true;
  }
  if (to_dtype == "F8_E4M3") return FromOurs<E4M3>(from_type, from, into, count);
  if (to_dtype == "F8_E5M2") return FromOurs<E5M2>(from_type, from, into, count);
  const std::optional<DType> own = ExactType(to_dtype);
  return own && ConvertElements(NameOf(from_type), from, *own, into, count);
}

}  // namespace mbridge
