// mbcoordinator: flags, signals, the local agent. The service itself is server/api/server.h.
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "proto/rpc/state_directory.h"
#include "proto/rpc/status_details.h"
#include "proto/rpc/version.h"
#include "recipes/config/resolve.h"
#include "recipes/config/word_option.h"
#include "server/api/server.h"
#include "server/launch/local_agent.h"

namespace mbridge::server {
namespace {

struct Flags {
  std::string state_directory;
  std::vector<std::string> listen;
  std::string metrics_listen = "127.0.0.1:9464";
  std::vector<std::string> checkpoint_roots, data_roots;
  bool no_local_agent = false;
  std::string agent_program;
  TlsFiles tls;
  std::string log_level = "info";
};

void Define(CLI::App* app, Flags* flags) {
  app->description("The training service: takes jobs, places them on nodes and keeps every fact about them.");
  app->set_version_flag("--version", VersionLine("mbcoordinator"));
  app->add_option("--state-dir", flags->state_directory, "Store, logs and local socket (env MB_STATE_DIR)")
      ->capture_default_str();
  app->add_option("--listen", flags->listen,
                  "HOST:PORT or unix:PATH, may be repeated [127.0.0.1:7070]; unix:STATE/coordinator.sock always");
  app->add_option("--metrics-listen", flags->metrics_listen, "HOST:PORT of /metrics, or none")->capture_default_str();
  app->add_option("--checkpoint-root", flags->checkpoint_roots, "Directory in which runs may save, may be repeated [STATE/runs]");
  app->add_option("--data-root", flags->data_roots, "Directory in which training data may lie, may be repeated [anywhere]");
  app->add_flag("--no-local-agent", flags->no_local_agent, "Start no agent on this machine");
  app->add_option("--agent-program", flags->agent_program, "The agent to start [mbagent beside this program]");
  app->add_option("--tls-cert", flags->tls.certificate, "Server certificate (PEM); needed where other machines connect");
  app->add_option("--tls-key", flags->tls.key, "Its key (PEM)");
  app->add_option("--tls-client-ca", flags->tls.client_ca, "Clients must show a certificate signed by this one (PEM)");
  app->add_option("--log-level", flags->log_level, "trace, debug, info, warn, error")
      ->check(recipes::OneOf({"trace", "debug", "info", "warn", "error"}))
      ->capture_default_str();
}

int Refuse(const absl::Status& status) {
  const v1::Reason reason = ReasonOf(status);
  const std::string name = reason == v1::REASON_UNSPECIFIED ? "" : ReasonName(reason) + ": ";
  fmt::print(stderr, "mbcoordinator: {}{}\n", name, std::string(status.message()));
  return std::max(1, InfoOf(reason).exit_code());
}

std::string Hostname() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

ServerOptions MakeOptions(const Flags& flags) {
  ServerOptions options;
  options.state_directory = flags.state_directory;
  options.listen = flags.listen.empty() ? std::vector<std::string>{"127.0.0.1:7070"} : flags.listen;
  const std::string local = LocalAddress(flags.state_directory);
  if (std::find(options.listen.begin(), options.listen.end(), local) == options.listen.end()) options.listen.push_back(local);
  options.metrics_listen = flags.metrics_listen;
  options.checkpoint_roots = flags.checkpoint_roots;
  options.data_roots = flags.data_roots;
  options.tls = flags.tls;
  options.version = VersionString();
  options.build_id = BuildId();
  options.local_hostname = flags.no_local_agent ? "" : Hostname();
  constexpr std::chrono::seconds kAgentStart{10};
  if (!flags.no_local_agent) options.node_wait = kAgentStart;
  return options;
}

// Keeps one agent running on this machine, ours or one that somebody else started.
class LocalAgent {
 public:
  explicit LocalAgent(const Flags& flags)
      : options_{flags.agent_program, flags.state_directory + "/agent", LocalAddress(flags.state_directory)} {}

  absl::Status Start() {
    MB_ASSIGN_OR_RETURN(pid_, StartLocalAgent(options_));
    return absl::OkStatus();
  }
  // To be called about once a second.
  void Check() {
    int status = 0;
    if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) {
      spdlog::warn("the local agent ended ({} {})", WIFSIGNALED(status) ? "signal" : "exit code",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
      pid_ = 0;
    }
    if (pid_ > 0 || LocalAgentRuns(options_.directory)) {
      wait_ = 0;
      return;
    }
    // An agent that ends at once is tried at 1, 2, 4 … 60 s.
    if (wait_ > 0 && --wait_ > 0) return;
    if (const absl::Status started = Start(); !started.ok()) spdlog::error("local agent: {}", std::string(started.message()));
    next_wait_ = std::min(next_wait_ * 2, 60);
    wait_ = next_wait_;
  }

 private:
  const LocalAgentOptions options_;
  pid_t pid_ = 0;
  int wait_ = 0, next_wait_ = 1;
};

int Main(int argc, char** argv) {
  Flags flags;
  flags.state_directory = DefaultStateDirectory(ProcessEnvironment);
  CLI::App app;
  Define(&app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  flags.state_directory = std::filesystem::absolute(flags.state_directory).lexically_normal();
  if (flags.state_directory.ends_with('/')) flags.state_directory.pop_back();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::from_str(flags.log_level));

  // Before any thread: signals are taken by sigtimedwait below.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int each : {SIGTERM, SIGINT}) sigaddset(&signals, each);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  auto server = Server::Start(MakeOptions(flags), {recipes::Resolve, recipes::ListRecipes, recipes::FindRecipe});
  if (!server.ok()) return Refuse(server.status());
  const ServerOptions shown = MakeOptions(flags);
  spdlog::info("{} listens on {}; metrics on {}; state in {}", VersionLine("mbcoordinator"), fmt::join(shown.listen, ", "),
               flags.metrics_listen, flags.state_directory);
  LocalAgent agent(flags);
  if (!flags.no_local_agent) {
    if (const absl::Status started = agent.Start(); !started.ok()) return Refuse(started);
  }
  int received = 0;
  while (received <= 0 && !(*server)->exit_requested()) {
    const timespec second{1, 0};
    received = sigtimedwait(&signals, nullptr, &second);
    if (!flags.no_local_agent && !(*server)->shutting_down()) agent.Check();
  }
  if (received > 0) {
    spdlog::info("signal {}: stopping; jobs go on", received);
  } else {
    spdlog::info("shut down");
  }
  (*server)->Stop();
  return 0;
}

}  // namespace
}  // namespace mbridge::server

int main(int argc, char** argv) { return mbridge::server::Main(argc, argv); }
