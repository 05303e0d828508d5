// The two forms of config.json: that of transformers 5 (`rope_parameters`, `dtype`) and that of older files (`rope_theta`,
// `rope_scaling`, `torch_dtype`).
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/bridge/config_keys.h"

namespace mbridge {

// A JSON object; Python's bare Infinity and NaN become {"__float__": "Infinity"}, as transformers 5 writes them. INVALID_ARGUMENT
// names `path` and the fault.
absl::StatusOr<Json> ParseConfigJson(std::string_view text, const std::string& path);

// The config in the form of transformers 5: rope_parameters holds type and base of the rotation.
Json ModernForm(const Json& config);

// `modern` in the form that `source` has: where that holds no rope_parameters, rope_theta and rope_scaling come back, and dtype
// is called torch_dtype if it is so there.
Json InFormOf(const Json& source, const Json& modern);

}  // namespace mbridge
