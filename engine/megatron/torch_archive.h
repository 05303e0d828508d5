// Files of torch.save (the zip form of PyTorch 1.6 and later) as data: the pickled object with its tensors, whose bytes stay in
// the file until they are read.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/core/dtype.h"
#include "engine/megatron/pickle_value.h"
#include "engine/megatron/zip_reader.h"

namespace mbridge {

// A tensor in a file. Every element lies within its storage.
struct TorchTensor {
  std::string type;            // torch's name: "BFloat16".
  std::optional<DType> dtype;  // None: a type that no parameter has.
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // In elements.
  int64_t offset = 0;            // In the file, of the first element.
};

class TorchArchive {
 public:
  // The archive in [begin, begin + bytes) of `file`, which must outlive it. DATA_LOSS and INVALID_ARGUMENT as ReadPickle and
  // ReadZipDirectory.
  static absl::StatusOr<TorchArchive> Open(const FileReader& file, int64_t begin, int64_t bytes);
  static absl::StatusOr<TorchArchive> Open(const FileReader& file) { return Open(file, 0, file.size()); }

  const PickleValue& root() const { return *pickle_.root; }
  Pickle TakePickle() && { return std::move(pickle_); }
  // Whether a value is a tensor or parameter, and where it lies. DATA_LOSS when it is one but not described rightly.
  static bool IsTensor(const PickleValue& value);
  absl::StatusOr<TorchTensor> TensorOf(const PickleValue& value) const;

 private:
  TorchArchive() = default;
  absl::Status Broken(const std::string& what) const;

  std::string path_;
  std::string folder_;  // Of the entries, with the slash.
  std::map<std::string, ZipEntry> entries_;
  Pickle pickle_;
};

struct TorchType {
  const char* name;
  int64_t bytes;               // Of an element.
  std::optional<DType> dtype;  // None: a type that no parameter has.
};
// By the name of torch's storage ("BFloat16"); null: unknown.
const TorchType* FindTorchType(const std::string& name);
// By the name of torch's dtype, "torch bfloat16". DATA_LOSS: unknown.
absl::StatusOr<TorchType> TypeOfDtype(const std::string& global);

}  // namespace mbridge
