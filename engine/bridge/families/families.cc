#include "engine/bridge/families/families.h"

namespace mbridge {

const std::vector<const Architecture*>& Architectures() {
  static const std::vector<const Architecture*> kAll = {
      &LlamaArchitecture(),   &MistralArchitecture(),  &Qwen2Architecture(),    &Qwen3Architecture(),
      &MixtralArchitecture(), &Qwen2MoeArchitecture(), &Qwen3MoeArchitecture(),
  };
  return kAll;
}

}  // namespace mbridge
