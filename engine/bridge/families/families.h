// One function a family, each in its own file; families.cc lists them.
#pragma once

#include "engine/bridge/architecture.h"

namespace mbridge {

const Architecture& Ernie45Architecture();
const Architecture& Exaone4Architecture();
const Architecture& GemmaArchitecture();
const Architecture& Gemma2Architecture();
const Architecture& Gemma3Architecture();
const Architecture& Glm4Architecture();
const Architecture& Gpt2Architecture();
const Architecture& GraniteArchitecture();
const Architecture& NemotronArchitecture();
const Architecture& Olmo2Architecture();
const Architecture& Phi3Architecture();
const Architecture& SmolLm3Architecture();
const Architecture& Starcoder2Architecture();
const Architecture& LlamaArchitecture();
const Architecture& MistralArchitecture();
const Architecture& Qwen2Architecture();
const Architecture& Qwen3Architecture();
const Architecture& MixtralArchitecture();
const Architecture& Qwen2MoeArchitecture();
const Architecture& Qwen3MoeArchitecture();
const Architecture& Qwen3NextArchitecture();
const Architecture& DeepSeekV2Architecture();
const Architecture& DeepSeekV3Architecture();
const Architecture& Glm4MoeArchitecture();
const Architecture& GptOssArchitecture();
const Architecture& MiniMaxM2Architecture();
const Architecture& Mamba2Architecture();
const Architecture& FalconH1Architecture();
const Architecture& NemotronHArchitecture();

}  // namespace mbridge
