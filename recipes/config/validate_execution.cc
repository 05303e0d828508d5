// How a step is executed: recomputation, CUDA graphs, on which device.
#include <algorithm>
#include <string>
#include <vector>

#include "proto/format/cuda_parts.h"
#include "recipes/config/layers.h"
#include "recipes/config/schema.h"
#include "recipes/config/validate.h"

namespace mbridge::recipes {
namespace {

const std::vector<std::string>& Modules() {
  static const std::vector<std::string> kModules = {"core_attn", "mlp", "layernorm", "mla_up_proj", "moe", "moe_act"};
  return kModules;
}

std::string Number(int64_t value) { return std::to_string(value); }

void ValidateModules(const v1::ModelConfig& model, ConfigState* state) {
  const auto fail = [&](const std::string& module, const std::string& why) {
    state->Fail("model.recompute_modules", "has " + module + "; " + why);
  };
  for (const std::string& module : model.recompute_modules()) {
    if (std::find(Modules().begin(), Modules().end(), module) == Modules().end()) {
      fail(module, "allowed: core_attn, mlp, layernorm, mla_up_proj, moe, moe_act" + DidYouMean(module, Modules()));
    } else if (module == "mla_up_proj" && !model.multi_latent_attention()) {
      fail(module, "allowed only with model.multi_latent_attention");
    } else if (module.starts_with("moe") && model.num_moe_experts() == 0) {
      fail(module, "allowed only with model.num_moe_experts");
    }
  }
}

void ValidateFullRecompute(const v1::ModelConfig& model, ConfigState* state) {
  if (!model.has_recompute_method())
    state->Fail("model.recompute_method", "is not set with model.recompute_granularity=full; allowed: uniform, block");
  if (!model.has_recompute_num_layers()) {
    state->Fail("model.recompute_num_layers", "is not set with model.recompute_granularity=full; allowed: 1 .. " +
                                                  Number(model.num_layers()) + ", 1 keeps least");
  } else if (model.num_layers() > 0 && model.recompute_num_layers() > model.num_layers()) {
    state->Fail("model.recompute_num_layers", "is " + Number(model.recompute_num_layers()) +
                                                  "; allowed: 1 .. model.num_layers, which is " + Number(model.num_layers()));
  }
}

}  // namespace

void ValidateExecution(ConfigState* state) {
  const v1::ModelConfig& model = state->config.model();
  const std::string& granularity = model.recompute_granularity();
  if (granularity == "full") ValidateFullRecompute(model, state);
  if (granularity == "selective") {
    ValidateModules(model, state);
    if (model.has_recompute_method())
      state->Fail("model.recompute_method", "is " + model.recompute_method() +
                                                " with model.recompute_granularity=selective; allowed: null, or "
                                                "model.recompute_granularity=full");
  } else if (!model.recompute_modules().empty()) {
    state->warnings.push_back("model.recompute_modules has no effect without model.recompute_granularity=selective");
  }
}

std::vector<FieldViolation> UnsupportedExecution(const v1::ModelConfig& model) {
  std::vector<FieldViolation> parts;
  if (model.recompute_granularity() == "selective" && (model.has_fp8() || model.has_fp4())) {
    parts.push_back({"model.recompute_granularity",
                     "is selective, which is not built together with 8-bit or 4-bit layers; accepted: full, or "
                     "mixed_precision=bf16_mixed"});
  }
  const std::string& graphs = model.cuda_graph_impl();
  if (graphs.empty() || graphs == "none") return parts;
  const auto refuse = [&](bool wanted, const std::string& why) {
    if (wanted) parts.push_back({"model.cuda_graph_impl", "is " + graphs + ", " + why});
  };
  refuse(graphs == "transformer_engine",
         "which needs an engine part that this version does not have; accepted: none, local, "
         "full_iteration");
  refuse(model.tensor_model_parallel_size() > 1,
         "and collectives between tensor-parallel ranks are not part of a recorded graph; accepted: none, or "
         "model.tensor_model_parallel_size=1");
  refuse(model.num_moe_experts() > 0, "which is not built together with experts; accepted: none, or a model without experts");
  refuse(model.has_fp8() || model.has_fp4(),
         "which is not built together with 8-bit or 4-bit layers; accepted: none, or mixed_precision=bf16_mixed");
  return parts;
}

std::string UnsupportedOnCuda(const v1::ModelConfig& model) {
  const LayerCounts layers = CountLayers(model);
  return WithoutCudaOperator({.gated_delta_net = layers.delta > 0,
                              .attention_output_gate = model.attention_output_gate(),
                              .mamba = layers.mamba > 0,
                              .mlp_gate_multiplier = model.has_mlp_gate_multiplier() && model.mlp_gate_multiplier() != 1,
                              .moe_experts = model.num_moe_experts(),
                              .moe_topk = model.moe_router_topk()});
}

}  // namespace mbridge::recipes
