#include "engine/bridge/families/families.h"

namespace mbridge {

const std::vector<const Architecture*>& Architectures() {
  static const std::vector<const Architecture*> kAll = {
      &Ernie45Architecture(),     //
      &Exaone4Architecture(),     //
      &GemmaArchitecture(),       //
      &Gemma2Architecture(),      //
      &Gemma3Architecture(),      //
      &Glm4Architecture(),        //
      &Gpt2Architecture(),        //
      &GraniteArchitecture(),     //
      &LlamaArchitecture(),       //
      &MistralArchitecture(),     //
      &MixtralArchitecture(),     //
      &NemotronArchitecture(),    //
      &Olmo2Architecture(),       //
      &Phi3Architecture(),        //
      &Qwen2Architecture(),       //
      &Qwen2MoeArchitecture(),    //
      &Qwen3Architecture(),       //
      &Qwen3MoeArchitecture(),    //
      &Starcoder2Architecture(),  //
  };
  return kAll;
}

}  // namespace mbridge
