// Texts of `mbctl help`, made from the schema.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace mbridge::mbctl {

// The table of exit codes, each with the reasons that lead to it.
std::string ExitCodesText();
// One reason (with or without REASON_, any case) or, for an empty name, all of them. NOT_FOUND lists similar ones.
absl::StatusOr<std::string> ErrorsText(const std::string& reason);
// The exit code table of docs/mbctl.md, in Markdown.
std::string ExitCodesMarkdown();

}  // namespace mbridge::mbctl
