// `mbrank train`: training without coordinator and agent, for debugging, benchmarks and the parity tests.
#pragma once

#include <string>
#include <vector>

#include "worker/rank/rank_run.h"

namespace mbridge {

struct StandaloneOptions {
  std::string recipe;
  std::string config_path;  // --config file between recipe and overrides.
  std::vector<std::string> overrides;
  std::string metrics_path;          // JSON lines of every MetricPoint; empty: none.
  std::string events_path;           // JSON lines of RankRecords, of ranks above 0 only the end; empty: none.
  std::string checkpoint_directory;  // Empty: nothing is saved.
  std::string load_checkpoint_path;
  bool load_weights_only = false;
  std::string device = "auto";  // cpu, cuda; auto: the device that this program was built for.
  int rank = 0;
  int ranks = 1;
  std::string rendezvous_directory;  // Shared by the ranks where ranks > 1.
  int threads = 0;                   // 0: all cores / ranks.
  bool profile_operators = false;    // Rank 0 prints where its time went; iterations are those of logger.log_interval.
};

// Prints Megatron-LM's lines; the exit code of the result's reason, through `exit` where the training thread hangs.
int RunStandalone(const StandaloneOptions& options, const ExitProcess& exit);

}  // namespace mbridge
