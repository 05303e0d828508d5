// A tensor of a Hugging Face checkpoint as plain numbers, whatever form it is stored in: as it is, as DeepSeek's FP8 with a scale
// per block (`…_scale_inv`), or as GPT-OSS's MXFP4 (`…_blocks`, `…_scales`).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/model_directory.h"
#include "engine/core/dtype.h"

namespace mbridge {

// Reading keeps nothing but scales in memory. One thread an object; `directory` must outlive it.
class SourceTensor {
 public:
  // Tensor `name` of the directory, plain or in a quantised form. NOT_FOUND when there is neither, INVALID_ARGUMENT for a form
  // that does not fit together or a dtype that no parameter has.
  static absl::StatusOr<std::unique_ptr<SourceTensor>> Open(const ModelDirectory& directory, const std::string& name);
  virtual ~SourceTensor() = default;

  const std::vector<int64_t>& shape() const { return shape_; }
  // The type that ours gets: exact for plain tensors; BF16 for quantised ones, as the models' own code makes.
  DType type() const { return type_; }
  // Of the stored tensor: "F32", "BF16", "F8_E4M3", "U8".
  const std::string& stored_dtype() const { return stored_dtype_; }
  bool quantised() const { return quantised_; }
  int64_t stored_bytes() const { return stored_bytes_; }

  // Elements [begin, begin + count) in row-major order as `to`.
  virtual absl::Status Read(int64_t begin, int64_t count, DType to, void* into) = 0;

 protected:
  std::vector<int64_t> shape_;
  DType type_ = DType::kF32;
  std::string stored_dtype_;
  bool quantised_ = false;
  int64_t stored_bytes_ = 0;
};

// Names that belong to a quantised tensor beside its own: "….weight_scale_inv" to "….weight", "…_blocks" and "…_scales" to "…".
// Empty when the name is none of them.
std::string QuantisedOwner(const std::string& name);

}  // namespace mbridge
