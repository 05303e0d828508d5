// The part of a submit that only conversions have.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "mbridge/v1/job.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge::server {

struct ConvertRoots {
  std::vector<std::string> checkpoint_roots;  // The first is the default.
  std::vector<std::string> data_roots;        // Empty: models may be read anywhere.
};

// What is wrong with the request's own fields.
std::vector<FieldViolation> CheckConvertFields(const v1::JobSpec& spec, bool validate_only);

// Makes the job a conversion on one CPU slot and sets its run directory. PATH_OUTSIDE_ROOTS for models that are read outside of
// the roots (of data and checkpoints), and for a directory that is written outside of the checkpoint roots.
absl::Status PrepareConvert(const ConvertRoots& roots, v1::Job* job);

}  // namespace mbridge::server
