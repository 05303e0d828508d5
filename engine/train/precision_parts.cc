#include "engine/train/precision_parts.h"

#include <optional>
#include <string_view>

#include <fmt/format.h>

namespace mbridge {
namespace {

std::optional<ScalingRecipe> ParseRecipe(std::string_view word) {
  if (word == "tensorwise") return ScalingRecipe::kCurrent;
  if (word == "delayed") return ScalingRecipe::kDelayed;
  if (word == "blockwise") return ScalingRecipe::kBlockwise;
  if (word == "mxfp8") return ScalingRecipe::kMxfp8;
  return std::nullopt;
}

std::string_view NameOf(ScalingRecipe recipe) {
  switch (recipe) {
    case ScalingRecipe::kNone: return "no";
    case ScalingRecipe::kCurrent: return "FP8 current (tensorwise)";
    case ScalingRecipe::kDelayed: return "FP8 delayed";
    case ScalingRecipe::kBlockwise: return "FP8 blockwise (1x128 and 128x128)";
    case ScalingRecipe::kMxfp8: return "MXFP8 (blocks of 32)";
    case ScalingRecipe::kNvfp4: return "NVFP4 (blocks of 16)";
  }
  return "unknown";
}

}  // namespace

void ReadLowPrecision(const v1::ModelConfig& keys, GptConfig* model, std::vector<FieldViolation>* problems) {
  LowPrecisionOptions& options = model->low_precision;
  if (!keys.has_fp8() && !keys.has_fp4()) return;
  if (keys.has_fp8()) {
    const std::optional<ScalingRecipe> recipe = ParseRecipe(keys.fp8_recipe());
    if (!recipe.has_value()) {
      problems->push_back(
          {"model.fp8_recipe", fmt::format("\"{}\" is none of tensorwise, delayed, blockwise, mxfp8", keys.fp8_recipe())});
      return;
    }
    options.recipe = *recipe;
    options.wide_gradients = keys.fp8() == "hybrid";
  } else {
    options.recipe = ScalingRecipe::kNvfp4;
  }
  options.margin = static_cast<int>(keys.fp8_margin());
  options.history_length = options.recipe == ScalingRecipe::kDelayed ? keys.fp8_amax_history_len() : 1;
  options.most_recent = keys.fp8_amax_compute_algo() == "most_recent";
  options.maxima_over_tensor_parallel = keys.tp_only_amax_red();
  options.weight_gradients = keys.fp8_wgrad();
  if (keys.first_last_layers_bf16()) {
    options.first_layers_apart = keys.num_layers_at_start_in_bf16();
    options.last_layers_apart = keys.num_layers_at_end_in_bf16();
  }
}

std::string DescribeLowPrecision(const GptConfig& model, bool narrow_products) {
  const LowPrecisionOptions& options = model.low_precision;
  if (!options.enabled()) return {};
  int64_t layers = 0;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) layers += IsLowPrecisionLayer(model, layer) ? 1 : 0;
  const bool narrowest = options.recipe == ScalingRecipe::kMxfp8 || options.recipe == ScalingRecipe::kNvfp4;
  std::string products = "products of 8-bit operands";
  if (!narrow_products) {
    products = fmt::format("products by emulation: operands are quantised, then multiplied in {}{}", mbridge::NameOf(model.dtype),
                           narrowest ? " (native products need sm_100; this version has none)" : "");
  }
  return fmt::format("linear layers of {} of {} layers with {} scaling, gradients in {}, {}", layers, model.num_layers,
                     NameOf(options.recipe),
                     options.recipe == ScalingRecipe::kNvfp4 ? "E2M1" : (options.wide_gradients ? "E5M2" : "E4M3"), products);
}

}  // namespace mbridge
