// What --dry-run and `recipe show` print of a resolved configuration.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "recipes/config/resolve.h"

namespace mbridge::v1 {
class JobSpec;
class ResolvedConfig;
}  // namespace mbridge::v1

namespace mbridge::mbctl {

// Facts of the node among the warnings of a resolved configuration begin so; they are shown as notes.
inline constexpr std::string_view kNotePrefix = "note: ";

// For people: every value with its origin (those at their default only with `all_values`), automatic changes, schedule,
// bytes per rank by class, size and work of the model, notes, warnings.
std::string DescribeResolved(const v1::ResolvedConfig& resolved, bool all_values);

// What `spec` says about a configuration, to be resolved with the recipes of this binary.
recipes::ResolveRequest ToResolveRequest(const v1::JobSpec& spec);

// Resolves with the recipes of this binary. `as_a_job`: refuse what the coordinator would refuse in a dry run.
absl::StatusOr<v1::ResolvedConfig> ResolveLocally(const v1::JobSpec& spec, bool as_a_job);

}  // namespace mbridge::mbctl
