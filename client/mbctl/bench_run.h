// The ranks of a bench on this machine: started, watched, ended.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge::mbctl {

// What rank 0 reported.
struct BenchReport {
  bool interrupted = false;  // By Ctrl-C or a signal to end; the rest is what there was until then.
  v1::RankStarted started;
  std::vector<v1::MetricPoint> points;  // Of training.
  v1::RankResult result;
  int64_t most_resident_bytes = 0;  // Of its process.
};

// Trains `spec` (recipe, config_yaml, overrides, ranks, device: CPU or CUDA) by one rank program a rank, without coordinator and
// checkpoints. Everything that they write, but index caches of data files that the configuration names, lies in a temporary
// directory that is gone when the call returns. `on_record` gets each event of rank 0 as it comes, from the calling thread. Where
// a rank fails the others are ended and the status has its reason and its last lines. While it runs, SIGINT, SIGTERM and SIGHUP
// end the ranks.
absl::StatusOr<BenchReport> RunBench(const v1::JobSpec& spec, const std::function<void(const v1::RankRecord&)>& on_record);

// CUDA_VISIBLE_DEVICES of each rank: one entry of the list `visible` (this process's; null: 0, 1, …) each. INVALID_ARGUMENT where
// it names fewer.
absl::StatusOr<std::vector<std::string>> DevicesOfRanks(const char* visible, int ranks);

}  // namespace mbridge::mbctl
