// The precision presets of Megatron-Bridge (training/mixed_precision.py) and what they set.
#include <map>
#include <vector>

#include "recipes/config/derive.h"

namespace mbridge::recipes {
namespace {

struct PresetValue {
  const char* key;  // Without "mixed_precision.".
  Value value;
};

std::vector<PresetValue> BasePreset(const std::string& type) {
  return {{"fp32", Value::Bool(type == "fp32")},
          {"fp16", Value::Bool(type == "fp16")},
          {"bf16", Value::Bool(type == "bf16")},
          {"params_dtype", Value::String(type)},
          {"grad_reduce_in_fp32", Value::Bool(true)}};
}

bool Contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Bridge's content of a preset; fp16_mixed reduces gradients in fp16 there, in fp32 here.
std::vector<PresetValue> PresetContent(const std::string& name) {
  const std::string type = name == "fp32" ? "fp32" : Contains(name, "fp16_") && !Contains(name, "bf16_") ? "fp16" : "bf16";
  std::vector<PresetValue> values = BasePreset(type);
  const auto add = [&values](const char* key, Value value) { values.push_back({key, std::move(value)}); };
  const auto fp8 = [&](const char* format, const char* recipe, bool param_gather) {
    add("fp8", Value::String(format));
    add("fp8_recipe", Value::String(recipe));
    add("fp8_param_gather", Value::Bool(param_gather));
    add("fp8_param", Value::Bool(param_gather));
  };
  const auto bf16_layers = [&](int64_t first, int64_t last) {
    add("first_last_layers_bf16", Value::Bool(true));
    add("num_layers_at_start_in_bf16", Value::Int(first));
    add("num_layers_at_end_in_bf16", Value::Int(last));
  };
  if (Contains(name, "fp8_delayed_scaling")) {
    fp8("hybrid", "delayed", true);
    add("fp8_margin", Value::Int(0));
    add("fp8_amax_history_len", Value::Int(1024));
    add("fp8_amax_compute_algo", Value::String("max"));
  } else if (name == "nanov2_bf16_with_fp8_current_scaling_mixed") {
    fp8("hybrid", "blockwise", true);
    bf16_layers(2, 2);
  } else if (name == "nemotron_h_bf16_with_fp8_current_scaling_mixed") {
    fp8("hybrid", "tensorwise", true);
    bf16_layers(2, 2);
  } else if (Contains(name, "fp8_current_scaling")) {
    fp8("hybrid", "tensorwise", true);
    bf16_layers(1, 1);
  } else if (Contains(name, "fp8_subchannel_scaling")) {
    fp8("hybrid", "blockwise", false);
  } else if (Contains(name, "mxfp8")) {
    fp8("e4m3", "mxfp8", true);
    add("reuse_grad_buf_for_mxfp8_param_ag", Value::Bool(true));
  } else if (Contains(name, "nvfp4")) {
    add("fp4", Value::String("e2m1"));
    add("fp4_recipe", Value::String("nvfp4"));
    add("fp4_param", Value::Bool(true));
    add("fp4_param_gather", Value::Bool(true));
    if (name == "nemotron_3_super_bf16_with_nvfp4_mixed") bf16_layers(0, 14);
  }
  return values;
}

void ApplyPreset(ConfigState* state) {
  const std::string& name = state->config.mixed_precision().preset();
  const int level = state->LevelOf("mixed_precision.preset");
  for (const PresetValue& entry : PresetContent(name)) {
    const std::string key = std::string("mixed_precision.") + entry.key;
    if (state->LevelOf(key) <= kDefault || state->LevelOf(key) < level) {
      state->Change(key, entry.value, "mixed_precision=" + name);
      continue;
    }
    const bool is_type = std::string(entry.key) == "fp16" || std::string(entry.key) == "bf16" ||
                         std::string(entry.key) == "fp32" || std::string(entry.key) == "params_dtype";
    if (is_type && state->Get(key) != entry.value) {
      state->Fail(key, "is " + state->Text(key) + " but mixed_precision=" + name + " makes it " + FormatValue(entry.value) +
                           "; leave it out, or choose another preset");
    }
  }
  if (name == "fp16_mixed") {
    state->warnings.push_back(
        "mixed_precision=fp16_mixed: gradients are reduced in fp32 here; Megatron-Bridge reduces them in fp16");
  }
}

// The type of mixed_precision becomes that of model and optimizer. A value of theirs that the user set wins or contradicts.
void SpreadType(const std::string& type, const std::string& source, ConfigState* state) {
  const std::pair<const char*, Value> wanted[] = {
      {"fp16", Value::Bool(type == "fp16")}, {"bf16", Value::Bool(type == "bf16")}, {"params_dtype", Value::String(type)}};
  for (const char* group : {"model.", "optimizer."}) {
    for (const auto& [name, value] : wanted) {
      const std::string key = group + std::string(name);
      if (state->Get(key) == value) continue;
      if (state->SetByUser(key)) {
        state->Fail(key, "is " + state->Text(key) + " but " + source + " makes it " + FormatValue(value) +
                             "; choose the precision with mixed_precision=bf16_mixed, fp16_mixed or fp32");
      } else {
        state->Change(key, value, source);
      }
    }
  }
}

// The narrow types of mixed_precision become the model's, as in Megatron-Bridge.
void SpreadNarrowTypes(ConfigState* state) {
  for (const char* name : {"fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
                           "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_param", "first_last_layers_bf16",
                           "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4", "fp4_recipe", "fp4_param"}) {
    state->Unify(std::string("mixed_precision.") + name, std::string("model.") + name,
                 std::string("mixed_precision.") + name + " and model." + name + " mean the same");
  }
}

}  // namespace

void DerivePrecision(ConfigState* state) {
  if (state->Has("mixed_precision.preset")) ApplyPreset(state);
  const v1::ConfigContainer& config = state->config;
  std::string type = "fp32", source = "mixed_precision=null";
  if (state->Has("mixed_precision.preset")) source = "mixed_precision=" + config.mixed_precision().preset();
  if (config.mixed_precision().bf16() && config.mixed_precision().fp16()) {
    return state->Fail("mixed_precision.fp16", "and mixed_precision.bf16 are both true; choose one");
  }
  if (config.mixed_precision().bf16() || config.mixed_precision().fp16()) {
    type = config.mixed_precision().bf16() ? "bf16" : "fp16";
  } else if (!state->Has("mixed_precision.preset")) {
    // Without mixed_precision the flags of the model decide, as in Megatron-Bridge.
    state->Unify("model.bf16", "optimizer.bf16", "model.bf16 and optimizer.bf16 are one switch");
    state->Unify("model.fp16", "optimizer.fp16", "model.fp16 and optimizer.fp16 are one switch");
    if (config.model().bf16() && config.model().fp16())
      return state->Fail("model.fp16", "and model.bf16 are both true; choose one");
    if (config.model().bf16() || config.model().fp16()) {
      type = config.model().bf16() ? "bf16" : "fp16";
      source = "model." + type;
    }
  }
  SpreadType(type, source, state);
  if (config.mixed_precision().has_fp8() || config.mixed_precision().has_fp4() || config.model().has_fp8() ||
      config.model().has_fp4()) {
    SpreadNarrowTypes(state);
  }
  for (const char* name : {"loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"}) {
    state->Unify(std::string("optimizer.") + name, std::string("mixed_precision.") + name,
                 std::string("optimizer.") + name + " and mixed_precision." + name + " mean the same");
  }
  if (!state->SetByUser("ddp.grad_reduce_in_fp32")) {
    state->Change("ddp.grad_reduce_in_fp32", Value::Bool(config.mixed_precision().grad_reduce_in_fp32()), source);
  }
}

}  // namespace mbridge::recipes
