// The keys of config.json as data: what each means for GptConfig, in both directions.
//
// Everything here works on the form that transformers 5 writes (config_form.h turns older files into it).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "engine/model/gpt_config.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

// Keeps the order of keys, so that a file that is written again looks like its source.
using Json = nlohmann::ordered_json;

// Reads keys and collects what is wrong with them. Null counts as absent.
class ConfigReader {
 public:
  explicit ConfigReader(const Json& config) : config_(config) {}

  bool Has(const std::string& key) const;
  // The value; null when absent. "a/b" is key b of object a.
  const Json& Get(const std::string& key) const;
  // A missing key without `absent` and a value of another type are faults (0, false or "" comes back).
  int64_t Int(const std::string& key, const int64_t* absent = nullptr);
  double Real(const std::string& key, const double* absent = nullptr);
  bool Flag(const std::string& key, const bool* absent = nullptr);
  std::string Text(const std::string& key, const std::string& absent);
  void Fault(const std::string& key, const std::string& description);
  // "config.json: hidden_act is "gelu": this family supports silu".
  void Unsupported(const std::string& key, const std::string& supported);

  // OK, or INVALID_ARGUMENT (UNSUPPORTED_MODEL) with every fault.
  absl::Status status() const;

 private:
  const Json& config_;
  std::vector<FieldViolation> faults_;
};

// Keys that are read and written together.
struct ConfigKey {
  std::vector<std::string> names;
  std::function<void(ConfigReader*, GptConfig*)> read;  // Null: the keys change nothing that is computed in training.
  std::function<void(const GptConfig&, Json*)> write;   // Null: not written to a config.json that is made from scratch.
};

// One number or flag. `absent`: what transformers takes when the key is missing or null; without it the key must be there.
// A function for `absent` sees what keys before this one have set.
ConfigKey IntKey(std::string name, int64_t GptConfig::*field);
ConfigKey IntKey(std::string name, int64_t GptConfig::*field, std::function<int64_t(const GptConfig&)> absent);
ConfigKey RealKey(std::string name, double GptConfig::*field);
ConfigKey RealKey(std::string name, double GptConfig::*field, double absent);
ConfigKey FlagKey(std::string name, bool GptConfig::*field, bool absent);
// A key of which one value is supported, e.g. hidden_act = "silu". `absent`: it may be missing (and then means `value`).
ConfigKey OnlyKey(std::string name, Json value, bool absent = true);
// As OnlyKey, with several spellings of the same; the first is written.
ConfigKey OneOfKey(std::string name, std::vector<Json> values);
// Keys without influence on what is computed in training.
ConfigKey FreeKeys(std::vector<std::string> names);
ConfigKey CustomKey(std::vector<std::string> names, std::function<void(ConfigReader*, GptConfig*)> read,
                    std::function<void(const GptConfig&, Json*)> write);

// Keys that many families share.
// vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size,
// max_position_embeddings, initializer_range, attention_dropout. `head_dim`: what it is when absent; 0: hidden size / heads.
std::vector<ConfigKey> DecoderKeys(int64_t head_dim = 0);
// What transformers takes for a family where the rotation says nothing.
struct RopeDefaults {
  double base = 10000;
  double percent = 1;
};
// rope_parameters: types default, linear, dynamic, llama3, yarn and longrope; partial_rotary_factor and
// original_max_position_embeddings beside them. After DecoderKeys.
ConfigKey RopeKey(RopeDefaults defaults = {});
// rope_parameters of two kinds of layers: full_attention as above, sliding_attention with a base alone.
ConfigKey LayeredRopeKey(double base, double local_base);
// sliding_window, switched by use_sliding_window (`used_if_absent` when missing), of the layers that max_window_layers or
// layer_types tells.
ConfigKey SlidingWindowKey(bool used_if_absent);
// sliding_window of the layers that layer_types tells, without it of all but each `period`-th (1: of none).
// `rope_with_window_only`: where some layers have the window, the others have no rotation.
ConfigKey LayerTypesKey(int64_t window_if_absent, int64_t period, bool rope_with_window_only);
// attention_bias (of its input and output layers) and mlp_bias.
ConfigKey LinearBiasKey();
// attention_bias alone, as above.
ConfigKey AttentionBiasKey();
// The activation of the MLP; the first one is written for its kind, and taken when absent.
ConfigKey ActivationKey(std::string name, std::vector<std::pair<std::string, ActivationKind>> kinds);
// Keys of every config.json: names of tokens, dtype, caches, versions.
ConfigKey CommonFreeKeys();

std::vector<ConfigKey> JoinKeys(std::initializer_list<std::vector<ConfigKey>> lists);

}  // namespace mbridge
