// --hf: the model of a Hugging Face directory as the configuration of a job.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace mbridge::v1 {
class JobSpec;
}

namespace mbridge::mbctl {

class Session;

inline constexpr const char* kModelRecipe = "from_hf";

// Puts the model into the configuration file of `spec`, below what the file already says; without a recipe it becomes from_hf.
// The model is a directory on the node or org/name of its hub cache. `local`: of this machine, read by mbrank.
absl::Status AddModel(Session* session, const std::string& model, bool local, v1::JobSpec* spec);

// Directories of this machine as absolute paths; org/name stays as it is.
std::string AbsoluteModel(const std::string& text);

}  // namespace mbridge::mbctl
