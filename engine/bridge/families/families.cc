#include "engine/bridge/families/families.h"

namespace mbridge {

const std::vector<const Architecture*>& Architectures() {
  static const std::vector<const Architecture*> kAll = {
      &DeepSeekV2Architecture(),  //
      &DeepSeekV3Architecture(),  //
      &Ernie45Architecture(),     //
      &Exaone4Architecture(),     //
      &FalconH1Architecture(),    //
      &GemmaArchitecture(),       //
      &Gemma2Architecture(),      //
      &Gemma3Architecture(),      //
      &Glm4Architecture(),        //
      &Glm4MoeArchitecture(),     //
      &Gpt2Architecture(),        //
      &GptOssArchitecture(),      //
      &GraniteArchitecture(),     //
      &LlamaArchitecture(),       //
      &Mamba2Architecture(),      //
      &MiniMaxM2Architecture(),   //
      &MistralArchitecture(),     //
      &MixtralArchitecture(),     //
      &NemotronArchitecture(),    //
      &NemotronHArchitecture(),   //
      &Olmo2Architecture(),       //
      &Phi3Architecture(),        //
      &Qwen2Architecture(),       //
      &Qwen2MoeArchitecture(),    //
      &Qwen3Architecture(),       //
      &Qwen3MoeArchitecture(),    //
      &Qwen3NextArchitecture(),   //
      &SmolLm3Architecture(),     //
      &Starcoder2Architecture(),  //
  };
  return kAll;
}

}  // namespace mbridge
