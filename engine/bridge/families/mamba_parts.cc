#include "engine/bridge/families/mamba_parts.h"

#include <algorithm>

namespace mbridge {
namespace {

// Numbers that JSON has no word for are objects in the files of transformers 5 (ParseConfigJson makes the same of others).
const Json kInfinity = {{"__float__", "Infinity"}};

}  // namespace

std::vector<TensorRule> MambaTensors(const std::string& theirs, const std::string& runtime) {
  std::vector<TensorRule> rules;
  for (const char* name : {"in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D",
                           "norm.weight", "out_proj.weight", "out_proj.bias"}) {
    TensorRule rule{.ours = std::string("decoder.layers.{layer}.mixer.") + name, .theirs = {theirs + name}};
    if (!runtime.empty()) rule.runtime = {runtime + name};
    rules.push_back(std::move(rule));
  }
  return rules;
}

ConfigKey TimeStepLimitKey() {
  const char* const name = "time_step_limit";
  const auto read = [name](ConfigReader* from, GptConfig* to) {
    const Json& limit = from->Get(name);
    if (limit.is_null()) return;
    const bool pair = limit.is_array() && limit.size() == 2 && limit[0].is_number() && limit[0].get<double>() >= 0;
    const bool infinite = pair && limit[1] == kInfinity;
    if (!pair || (!infinite && (!limit[1].is_number() || limit[1].get<double>() < limit[0].get<double>()))) {
      from->Unsupported(name, "two numbers from 0 on, the second at least the first");
      return;
    }
    to->mamba_dt_min = limit[0].get<double>();
    to->mamba_dt_max = infinite ? 0.0 : limit[1].get<double>();
  };
  const auto write = [name](const GptConfig& from, Json* to) {
    (*to)[name] = Json::array({from.mamba_dt_min, from.mamba_dt_max > 0 ? Json(from.mamba_dt_max) : kInfinity});
  };
  return CustomKey({name}, read, write);
}

ConfigKey MambaFreeKeys() {
  return FreeKeys({"chunk_size", "mamba_chunk_size", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32",
                   "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_rank",
                   "time_step_scale", "use_mamba_kernels", "mamba_ssm_cache_dtype"});
}

void SetLayers(MixerKind mixer, bool mlp, GptConfig* config) {
  constexpr int64_t kMost = 100'000;
  const auto layers = static_cast<size_t>(std::clamp<int64_t>(config->num_layers, 0, kMost));
  config->mixers.assign(layers, mixer);
  if (!mlp) config->mlp_layer_freq.assign(layers, 0);
}

}  // namespace mbridge
