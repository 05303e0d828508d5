#include "engine/data/npy.h"

#include <cstring>

#include <fmt/format.h>

#include "engine/data/data_status.h"
#include "engine/data/durable_file.h"

namespace mbridge {
namespace {

constexpr std::string_view kPrelude("\x93NUMPY\x01\x00", 8);

// The dictionary, padded so that the data start at a multiple of 64.
std::string HeaderText(std::string_view descr, const std::vector<int64_t>& shape) {
  std::string dimensions;
  for (int64_t size : shape) dimensions += fmt::format("{}{}", dimensions.empty() ? "" : ", ", size);
  if (shape.size() == 1) dimensions += ",";
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, dimensions);
  // NumPy leaves room for the first dimension to grow to 21 digits.
  text.append(21 - fmt::format("{}", shape[0]).size(), ' ');
  const size_t unpadded = kPrelude.size() + 2 + text.size() + 1;
  text.append((64 - unpadded % 64) % 64, ' ');
  return text + "\n";
}

// Without white space, so that headers of other NumPy versions compare equal.
std::string Squeeze(std::string_view text) {
  std::string result;
  for (char c : text) {
    if (c != ' ' && c != '\n') result += c;
  }
  return result;
}

}  // namespace

absl::Status WriteNpyBytes(const std::string& path, std::string_view descr, const std::vector<int64_t>& shape, const void* data,
                           size_t bytes) {
  const std::string header = HeaderText(descr, shape);
  const uint16_t length = static_cast<uint16_t>(header.size());
  MB_ASSIGN_OR_RETURN(auto file, DurableFile::Create(path));
  MB_RETURN_IF_ERROR(file->Append(kPrelude.data(), kPrelude.size()));
  MB_RETURN_IF_ERROR(file->Append(&length, sizeof length));
  MB_RETURN_IF_ERROR(file->Append(header.data(), header.size()));
  MB_RETURN_IF_ERROR(file->Append(data, bytes));
  return file->Commit();
}

std::optional<int64_t> NpyDataOffset(const MappedFile& file, std::string_view descr, int64_t element_bytes,
                                     const std::vector<int64_t>& shape) {
  if (file.size() < 10 || std::memcmp(file.data(), kPrelude.data(), kPrelude.size()) != 0) return std::nullopt;
  uint16_t length;
  std::memcpy(&length, file.data() + 8, sizeof length);
  const int64_t offset = 10 + length;
  int64_t elements = 1;
  for (int64_t size : shape) elements *= size;
  if (offset % 16 != 0 || offset > file.size() || file.size() - offset != elements * element_bytes) return std::nullopt;
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + 10, length);
  if (Squeeze(header) != Squeeze(HeaderText(descr, shape))) return std::nullopt;
  return offset;
}

}  // namespace mbridge
