// Archives of torch.save, byte by byte in order: zip files of uncompressed entries (see zip_reader.h). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/dtype.h"

namespace mbridge {

// What stands before and after the bytes of the tensor. The lengths depend on type and shape alone.
struct TensorFrame {
  std::string before, after;
};

// Largest tensor of an archive: sizes of 4 GiB and more would need Zip64.
inline constexpr int64_t kMaxArchivedTensorBytes = int64_t{2} << 30;

// The archive of one contiguous tensor; `crc32`: that of zlib over its bytes.
TensorFrame FrameOfTensor(DType dtype, const std::vector<int64_t>& shape, uint32_t crc32);

// The archive of an object without tensors, from its pickle.
std::string ArchiveOfObject(const std::string& pickle);

// "bfloat16": torch's name.
const char* TorchDtypeName(DType dtype);

}  // namespace mbridge
