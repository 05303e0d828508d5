// What a torch_dist checkpoint of a model consists of: tensors in blocks, objects, and where in which file each lies. Everything
// but the tensors' bytes follows from names, shapes and types.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Rows of one parameter that are one block of a stored tensor.
struct PlannedBlock {
  size_t parameter = 0;  // Index in the list that the plan was made of.
  int64_t first_row = 0;
  std::vector<int64_t> offsets, sizes;  // In the stored tensor.
  size_t tensor = 0;                    // Index in tensors.
  size_t file = 0;
  int64_t offset = 0, length = 0;  // Of its archive in the file.
};

struct PlannedTensor {
  std::string key;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<size_t> blocks;
};

struct PlannedObject {
  std::string key;
  std::string archive;
  int64_t offset = 0;  // In the first file.
};

struct TorchDistPlan {
  std::vector<PlannedTensor> tensors;
  std::vector<PlannedBlock> blocks;  // In the order of the files.
  std::vector<PlannedObject> objects;
  std::vector<int64_t> file_bytes;  // By file.
  int64_t tensor_bytes = 0;
};

struct PlannedParameter {
  std::string name;
  DType dtype = DType::kF32;  // As written.
  Shape shape;
};

// Name of a data file.
std::string DataFileName(size_t file);

// `common`: the pickle of the common state, as an object of its own. Layers that are alike are stacked.
TorchDistPlan PlanTorchDist(const GptConfig& config, const std::vector<PlannedParameter>& parameters, const std::string& common,
                            int64_t file_bytes = int64_t{2} << 30);

// The content of .metadata.
std::string MetadataOf(const TorchDistPlan& plan);

}  // namespace mbridge
