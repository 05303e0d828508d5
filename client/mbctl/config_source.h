// Where the configuration of a training comes from on a command line: --recipe, --config, --hf.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "mbridge/v1/job.pb.h"

namespace CLI {
class App;
}

namespace mbridge::mbctl {

class Session;

struct ConfigSource {
  std::string recipe, config_file, model;
};

void AddConfigSource(CLI::App* command, ConfigSource* source);

// A spec with recipe and configuration text. `local`: the model is on this machine, not on the coordinator's node. Errors where
// nothing is named or a file cannot be read.
absl::StatusOr<v1::JobSpec> ReadConfigSource(Session* session, const ConfigSource& source, bool local);

}  // namespace mbridge::mbctl
