// NumPy's .npy array files, version 1.0, C order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

#include "engine/data/mapped_file.h"

namespace mbridge {

// descr of the element types that the indices use.
template <class T> constexpr std::string_view kNpyDescr = "";
template <> inline constexpr std::string_view kNpyDescr<int16_t> = "<i2";
template <> inline constexpr std::string_view kNpyDescr<int32_t> = "<i4";
template <> inline constexpr std::string_view kNpyDescr<uint32_t> = "<u4";
template <> inline constexpr std::string_view kNpyDescr<int64_t> = "<i8";

// Byte for byte what numpy.save writes.
absl::Status WriteNpyBytes(const std::string& path, std::string_view descr, const std::vector<int64_t>& shape, const void* data,
                           size_t bytes);
template <class T> absl::Status WriteNpy(const std::string& path, const std::vector<int64_t>& shape, std::span<const T> values) {
  return WriteNpyBytes(path, kNpyDescr<T>, shape, values.data(), values.size_bytes());
}

// Offset of the data where the file is a .npy of exactly this type and shape, aligned to 16 bytes; nullopt otherwise.
std::optional<int64_t> NpyDataOffset(const MappedFile& file, std::string_view descr, int64_t element_bytes,
                                     const std::vector<int64_t>& shape);
template <class T> std::optional<std::span<const T>> ReadNpy(const MappedFile& file, const std::vector<int64_t>& shape) {
  const auto offset = NpyDataOffset(file, kNpyDescr<T>, sizeof(T), shape);
  if (!offset) return std::nullopt;
  return std::span<const T>(reinterpret_cast<const T*>(file.data() + *offset),
                            static_cast<size_t>(file.size() - *offset) / sizeof(T));
}

}  // namespace mbridge
