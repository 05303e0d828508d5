// Elements of safetensors files as elements of ours.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/core/dtype.h"

namespace mbridge {

// The type of ours that holds every value of the format's dtype: itself where we have it, BF16 for the 8-bit floats; none for
// dtypes that no parameter has (I8, I16, U16, U32, U64, BOOL, F8_E8M0).
std::optional<DType> ExactType(std::string_view dtype);

// Of two types of parameters the one that holds the values of both; none for an integer beside a float.
std::optional<DType> WiderType(DType a, DType b);

// Values of the 8-bit floats. E4M3 is the variant without infinities (largest 448), E5M2 has them, E8M0 is a power of two.
float FromE4M3(uint8_t bits);
float FromE5M2(uint8_t bits);
float FromE8M0(uint8_t bits);

// `count` elements, rounded to nearest even where `to` is narrower. Integers are only copied as they are. False when there is no
// such conversion.
bool ConvertElements(std::string_view from_dtype, const void* from, DType to, void* into, int64_t count);
// The other way: from ours to the format's dtype, as far as ExactType knows it.
bool ConvertToFormat(DType from_type, const void* from, std::string_view to_dtype, void* into, int64_t count);

}  // namespace mbridge
