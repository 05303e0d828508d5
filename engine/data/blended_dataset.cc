#include "engine/data/blended_dataset.h"

#include "engine/core/error.h"

namespace mbridge {

void BlendedDataset::Get(int64_t index, const SampleView& sample) const {
  if (index < 0 || index >= size()) ThrowEngineError("sample {} of a blend: out of range 0 to {}", index, size() - 1);
  const size_t i = static_cast<size_t>(index);
  parts_[static_cast<size_t>(index_.dataset[i])]->Get(index_.dataset_sample[i], sample);
}

}  // namespace mbridge
