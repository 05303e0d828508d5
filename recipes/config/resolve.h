// From a recipe name and key=value lines to a validated configuration in which every value has an origin.
//
// Chain: schema defaults -> recipe files (base first) -> --config file -> overrides -> derived values -> validation ->
// estimate. The same code runs in the coordinator at submit, in mbctl --dry-run and in the rank. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/recipe.pb.h"

namespace mbridge::recipes {

struct ResolveRequest {
  std::string recipe;                  // Name or alias.
  std::string config_yaml;             // Text of a --config file; may be empty.
  std::vector<std::string> overrides;  // key.path=value
  int ranks = 0;                       // 0: the smallest legal number (TP * PP * CP).
  v1::JobKind kind = v1::JOB_KIND_PRETRAIN;
  v1::Device device = v1::DEVICE_UNSPECIFIED;  // That the estimates are for; unspecified: the CPU.
  // True at submit: a recipe whose model parts do not exist, or not on a CUDA device, is refused (UNSUPPORTED_MODEL). False for
  // `recipe show`.
  bool require_trainable = true;
};

// INVALID_ARGUMENT with one BadRequest violation per wrong key (all of them, not only the first): UNKNOWN_KEY with the
// nearest names, KEY_WITHOUT_EFFECT, INVALID_CONFIG; UNKNOWN_RECIPE (NOT_FOUND); UNSUPPORTED_MODEL (UNIMPLEMENTED).
absl::StatusOr<v1::ResolvedConfig> Resolve(const ResolveRequest& request);

// What the request behind `resolved` would give with these lines in addition, in place of its own words on the same keys, on that
// many ranks. Errors as above.
absl::StatusOr<v1::ResolvedConfig> ResolveAgain(const v1::ResolvedConfig& resolved, const std::vector<std::string>& overrides,
                                                int ranks);

// One name for all ways to write a key: train.eval_iters is validation.eval_iters, model.transformer.X model.X,
// mixed_precision mixed_precision.preset. A key that does not exist stays as it is.
std::string CanonicalKey(const std::string& key);

// The recipes that this binary carries (YAML files embedded at build time), by name.
std::vector<v1::Recipe> ListRecipes();
absl::StatusOr<v1::Recipe> FindRecipe(const std::string& name_or_alias);

}  // namespace mbridge::recipes
