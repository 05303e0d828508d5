// mbrank and mbrank-cuda: the process of one rank, and the subcommands that need the engine (preflight, verification, data
// preparation).
#include <CLI/CLI.hpp>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "proto/rpc/version.h"
#include "worker/rank/convert_command.h"
#include "worker/rank/data_command.h"
#include "worker/rank/preflight.h"
#include "worker/rank/rank_run.h"
#include "worker/rank/standalone.h"

namespace {

void AddTrain(CLI::App* app, mbridge::StandaloneOptions* options) {
  CLI::App* train = app->add_subcommand("train", "Train without coordinator and agent");
  train->add_option("--recipe", options->recipe, "Recipe name; may be left out where --config says all");
  train->add_option("--config", options->config_path, "YAML file between recipe and overrides");
  train->add_option("overrides", options->overrides, "key.path=value");
  train->add_option("--metrics", options->metrics_path, "Write every metric point as a JSON line to this file");
  train->add_option("--events", options->events_path, "Write every event, the end too, as a JSON line (RankRecord) to this file");
  train->add_option("--save", options->checkpoint_directory, "Directory for checkpoints (default: none are written)");
  train->add_option("--load", options->load_checkpoint_path, "Checkpoint directory to start from");
  train->add_flag("--weights-only", options->load_weights_only, "Take only the weights of --load, start at iteration 0");
  train->add_option("--device", options->device, "cpu, cuda, or auto: what this program was built for")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  train->add_option("--rank", options->rank, "Rank of this process")->check(CLI::NonNegativeNumber);
  train->add_option("--ranks", options->ranks, "Number of ranks")->check(CLI::PositiveNumber);
  train->add_option("--rendezvous", options->rendezvous_directory, "Directory where the ranks meet (with --ranks above 1)");
  train->add_flag("--profile-operators", options->profile_operators,
                  "Time every operator of rank 0 and print a table against the device's limits (with logger.log_interval=1)");
  train->add_option("--threads", options->threads, "Threads (default: cores / ranks)")->check(CLI::NonNegativeNumber);
}

// OpenMP read its environment when the program was loaded: starts the program again with the right one, as the shim does for
// ranks of jobs. A spinning barrier on a busy core costs a time slice.
void EnsurePassiveWaiting(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  execv("/proc/self/exe", argv);  // Where that fails, training is only slower.
}

// After a fault without the exit handlers: that of a driver whose GPU still waits for a lost peer may never return.
int Leave(int code) {
  if (code == 0) return 0;
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace

int main(int argc, char** argv) {
  EnsurePassiveWaiting(argv);
  CLI::App app("mbrank: a rank of a training job");
  app.set_version_flag("--version", mbridge::VersionLine("mbrank"));
  std::string spec_path, verify_path, manifest_hash;
  bool preflight = false;
  app.add_option("--spec", spec_path, "RankSpec file written by the agent");
  app.add_flag("--preflight", preflight, "Check the node for the job of --spec; binary PreflightResult on standard output");
  app.add_option("--verify", verify_path, "Verify every checksum of a checkpoint directory");
  app.add_option("--manifest-hash", manifest_hash, "XXH3-64 that manifest.json must have, with --verify");
  mbridge::StandaloneOptions standalone;
  AddTrain(&app, &standalone);
  mbridge::DataCommand data(&app);
  mbridge::ConvertCommand convert(&app);
  app.require_subcommand(0, 1);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;  // CLI11's own codes are not ours.
  }

  if (app.got_subcommand("train")) {
    if (standalone.recipe.empty() && standalone.config_path.empty()) {
      std::fprintf(stderr, "mbrank: train needs --recipe NAME or --config FILE\n");
      return 2;
    }
    if (standalone.ranks > 1 && standalone.rendezvous_directory.empty()) {
      std::fprintf(stderr, "mbrank: --ranks %d needs --rendezvous DIR, the same for every rank\n", standalone.ranks);
      return 2;
    }
    return Leave(mbridge::RunStandalone(standalone, &std::_Exit));
  }
  if (app.got_subcommand("data")) return data.Run();
  if (app.got_subcommand("convert")) return convert.Run();
  if (!verify_path.empty()) return mbridge::RunVerify(verify_path, manifest_hash);
  if (!spec_path.empty()) return preflight ? mbridge::RunPreflight(spec_path) : Leave(mbridge::RunRank(spec_path, &std::_Exit));
  std::fprintf(stderr, "%s", app.help().c_str());
  return 2;
}
