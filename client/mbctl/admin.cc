// admin info|shutdown.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/format/training_line.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

std::string DescribeServer(const v1::GetServerInfoResponse& info, const std::string& address) {
  std::string text;
  const auto line = [&text](const std::string& name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<16} {}\n", name, value);
  };
  line("address", address);
  line("version", fmt::format("{} (build {})", info.version(), info.build_id()));
  line("up", FormatDuration(static_cast<double>(info.uptime_seconds())));
  line("instance", info.instance_id());
  line("state", info.state_directory());
  for (const std::string& root : info.checkpoint_roots()) line("checkpoint root", root);
  for (const std::string& root : info.data_roots()) line("data root", root);
  line("metrics", info.metrics_address());
  line("store version", fmt::format("{}", info.store_version()));
  return text;
}

}  // namespace

void AddAdmin(CLI::App* app, Session* session) {
  auto* group = app->add_subcommand("admin", "The coordinator itself: info, shutdown");
  group->require_subcommand(1);
  auto* info = group->add_subcommand("info", "Version, directories and age of the coordinator");
  info->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const auto answer, *session, client->GetServerInfo());
      return session->Print(answer, answer.version(), [&] { return DescribeServer(answer, client->options().server); });
    };
  });
  struct Flags {
    bool yes = false;
    int grace = 0;
  };
  auto flags = std::make_shared<Flags>();
  auto* shutdown = group->add_subcommand("shutdown", "End every job, then the local agent and the coordinator");
  shutdown->add_flag("-y,--yes", flags->yes, "Do not ask");
  shutdown->add_option("--grace", flags->grace, "Seconds that jobs have to save; 0: 30")->check(CLI::Range(0, 86400));
  shutdown->callback([=] {
    session->action = [=]() -> int {
      if (!session->Confirm("shut down the service and end all its jobs", flags->yes)) return client::kExitInvalid;
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const auto answer, *session, client->Shutdown(flags->grace));
      return session->Print(answer, "", [&] { return fmt::format("{} jobs ended\n", answer.jobs_ended()); });
    };
  });
}

}  // namespace mbridge::mbctl
