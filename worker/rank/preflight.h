// `mbrank --preflight --spec FILE`: facts of the node checked before a job is accepted.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "mbridge/v1/rank.pb.h"

namespace mbridge {

// Data files, checkpoint to load, disk space, memory. Never throws; every problem names a key or a path.
v1::PreflightResult CheckNode(const v1::RankSpec& spec);

// A problem for every field violation of a status, or one of `field`; `fallback`: the reason where it has none.
void AddProblems(const absl::Status& status, const std::string& field, v1::Reason fallback, v1::PreflightResult* result);

// Reads the spec, writes a binary PreflightResult to standard output. 0 when the check itself worked.
int RunPreflight(const std::string& spec_path);

// `mbrank --verify PATH [--manifest-hash H]`: one JSON line {"ok", "bytes", "tensors", "reason", "detail"}; exit code 0 either
// way.
int RunVerify(const std::string& path, const std::string& manifest_hash);

}  // namespace mbridge
