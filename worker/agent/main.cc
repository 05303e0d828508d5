// mbagent: supervises the rank processes of one node.
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <filesystem>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include "engine/core/gpu_architectures.h"
#include "proto/rpc/status_details.h"
#include "proto/rpc/version.h"
#include "worker/agent/agent.h"
#include "worker/agent/coordinator_link.h"
#include "worker/agent/inventory.h"
#include "worker/agent/supervise.h"

namespace mbridge::agent {
namespace {

std::atomic<bool> stop_requested{false};

void RequestStop(int) { stop_requested.store(true); }

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "mbagent: %s\n", std::string(status.message()).c_str());
  if (status.code() == absl::StatusCode::kInvalidArgument) return InfoOf(v1::REASON_INVALID_CONFIG).exit_code();
  return InfoOf(v1::REASON_STORE_LOCKED).exit_code();
}

int Main(int argc, char** argv) {
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  AgentOptions options;
  options.programs = {here / "mbshim", here / "mbrank", here / "mbrank-cuda"};
  LinkOptions link_options;
  int cpu_slots = 0;

  CLI::App app{
      "Node agent: connects to a coordinator, starts the ranks of its jobs on this machine and keeps them running.\n"
      "Example: mbagent --coordinator coordinator.example:7070 --state-dir /var/lib/mbridge/agent"};
  app.set_version_flag("--version", VersionLine("mbagent"));
  app.add_option("--coordinator", link_options.target, "gRPC address: unix:/path/coordinator.sock or host:port")->required();
  app.add_option("--state-dir", options.state_directory, "Directory of this agent: node id, attempts, logs, spools")->required();
  app.add_option("--rank-program", options.programs.rank, "Rank program for the CPU")->capture_default_str();
  app.add_option("--cuda-rank-program", options.programs.cuda_rank, "Rank program for GPUs")->capture_default_str();
  app.add_option("--shim-program", options.programs.shim, "Shim program")->capture_default_str();
  app.add_option("--cpu-slots", cpu_slots, "CPU slots to offer; 0: the cores that this process may use")
      ->check(CLI::Range(0, 4096));
  app.add_option("--tls-ca", link_options.tls_ca, "PEM file with the coordinator's CA; makes the connection TLS");
  app.add_option("--tls-cert", link_options.tls_cert, "PEM file with this agent's certificate");
  app.add_option("--tls-key", link_options.tls_key, "PEM file with its key");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : InfoOf(v1::REASON_INVALID_CONFIG).exit_code();
  }

  spdlog::set_default_logger(spdlog::stderr_color_mt("mbagent"));
  spdlog::flush_on(spdlog::level::info);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGTERM, RequestStop);
  ::signal(SIGINT, RequestStop);

  options.state_directory = (std::filesystem::absolute(options.state_directory) / ".").lexically_normal().parent_path();
  options.inventory = ReadInventory(cpu_slots);
  LeaveOutGpusWithoutKernels(&options.inventory, BuiltGpuArchitectures());
  if (options.inventory.gpus_size() > 0 && !std::filesystem::exists(options.programs.cuda_rank)) {
    spdlog::warn("{} GPUs are not offered: {} does not exist. Build it with the CUDA toolkit, or give --cuda-rank-program",
                 options.inventory.gpus_size(), options.programs.cuda_rank);
    options.inventory.clear_gpus();
  }
  options.inventory.set_agent_version(VersionString());
  options.inventory.set_build_id(BuildId());
  auto agent = Agent::Open(options);
  if (!agent.ok()) return Fail(agent.status());
  auto link = CoordinatorLink::Open(link_options);
  if (!link.ok()) return Fail(link.status());
  spdlog::info("node {} with {} CPU slots and {} GPUs serves {}", (*agent)->node_id(), options.inventory.cpu_cores(),
               options.inventory.gpus().size(), link_options.target);
  Supervise(agent->get(), link->get(), stop_requested);
  spdlog::info("ends");
  return 0;
}

}  // namespace
}  // namespace mbridge::agent

int main(int argc, char** argv) { return mbridge::agent::Main(argc, argv); }
