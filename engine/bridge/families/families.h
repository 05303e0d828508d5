// One function a family, each in its own file; families.cc lists them.
#pragma once

#include "engine/bridge/architecture.h"

namespace mbridge {

const Architecture& LlamaArchitecture();
const Architecture& MistralArchitecture();
const Architecture& Qwen2Architecture();
const Architecture& Qwen3Architecture();
const Architecture& MixtralArchitecture();
const Architecture& Qwen2MoeArchitecture();
const Architecture& Qwen3MoeArchitecture();

}  // namespace mbridge
