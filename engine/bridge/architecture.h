// A family of Hugging Face models as data: what its config.json means and which tensors its checkpoints hold. Both directions
// follow from the one table (engine/bridge/families). Immutable after construction, thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bridge/config_keys.h"
#include "engine/bridge/tensor_map.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

struct Architecture {
  std::string model_type;                 // Of config.json: "llama".
  std::string class_name;                 // Its `architectures`: "LlamaForCausalLM".
  GptConfig parts;                        // What every model of the family is made of; keys fill in the rest.
  std::vector<ConfigKey> keys;            // Every key that a config.json of the family may hold.
  std::vector<TensorRule> tensors;        // Every parameter that a model of the family may have.
  std::vector<std::string> unused;        // Names of tensors that files hold beside ({layer} as in rules).
  std::vector<std::string> accepts = {};  // Further values of model_type that are the same family.
  std::string prefix = "model.";  // Of all tensors but the head; files of the model without its head lack it (GPT-2's own).
};

// All families, by model_type.
const std::vector<const Architecture*>& Architectures();
// UNSUPPORTED_MODEL naming model_type and the known ones.
absl::StatusOr<const Architecture*> FindArchitecture(const std::string& model_type);
// By the model_type of a config.json.
absl::StatusOr<const Architecture*> ArchitectureOf(const Json& config);

// config.json (either form) as our configuration: FP32, seq_length = max_position_embeddings, no dropout after the residual
// branches, padded_vocab_size = vocab_size. INVALID_ARGUMENT (UNSUPPORTED_MODEL) lists every key that is missing, unknown, of
// another type or of a value that the engine cannot do.
absl::StatusOr<GptConfig> ReadModelConfig(const Architecture& architecture, const Json& config);

// Our configuration as config.json: `source` itself where it means the same, else its keys with the values of `config`; an empty
// source: from scratch in the form of transformers 5. `vocab_size`: without padding. INVALID_ARGUMENT (UNSUPPORTED_MODEL) when
// the family cannot express the model.
absl::StatusOr<Json> WriteModelConfig(const Architecture& architecture, const GptConfig& config, int64_t vocab_size,
                                      const Json& source);

// The fields that say what is computed: without sizes of batches, dropout, initial weights, padding and numerics.
GptConfig ModelShape(GptConfig config);

// The parameters of a model with their global shapes, in the order of creation. Allocates no weights. Engine faults as statuses.
absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const GptConfig& config);

// Mappings of all parameters, in their order. UNSUPPORTED_MODEL names parameters that the family's table lacks.
absl::StatusOr<std::vector<TensorMapping>> MapModel(const Architecture& architecture, const GptConfig& config,
                                                    const std::vector<ParameterSpec>& parameters, int64_t vocab_size,
                                                    bool runtime = false);

// Takes the prefix off the names of theirs, for files without it.
void RemovePrefix(const Architecture& architecture, std::vector<TensorMapping>* mappings);
// Whether files with these tensors lack the prefix.
bool LacksPrefix(const Architecture& architecture, const std::vector<std::string>& names);

// What a tensor that no parameter uses is.
enum class ExtraTensor : uint8_t {
  kUnused,   // Of the family's list of unused tensors.
  kDenied,   // A parameter of the family that config.json says the model does not have.
  kUnknown,  // Not of the family.
};
ExtraTensor ClassifyExtra(const Architecture& architecture, const std::string& name);

}  // namespace mbridge
