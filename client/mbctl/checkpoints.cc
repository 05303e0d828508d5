// ckpt ls|get|verify|pin|unpin|rm.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

std::string StateName(v1::CheckpointState state) { return StripPrefix(v1::CheckpointState_Name(state), "CHECKPOINT_STATE_"); }

std::string CheckpointTable(const std::vector<v1::Checkpoint>& checkpoints) {
  Table table({"CHECKPOINT", "STEP", "STATE", "SIZE", "LOSS", "PINNED", "JOB", "AGE"});
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    const double loss = checkpoint.metrics().lm_loss();
    table.Add({checkpoint.checkpoint_id(), fmt::format("{}", checkpoint.step()), StateName(checkpoint.state()),
               recipes::FormatBytes(checkpoint.bytes()),
               !checkpoint.has_metrics() ? "-"
               : std::isnan(loss)        ? "NaN"
                                         : fmt::format("{:.4f}", loss),
               checkpoint.pinned() ? "yes" : "no", checkpoint.job_id(), FormatAge(checkpoint.commit_time())});
  }
  return table.Text();
}

std::string DescribeCheckpoint(const v1::Checkpoint& checkpoint) {
  std::string text;
  const auto line = [&text](const std::string& name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<12} {}\n", name, value);
  };
  line("checkpoint", checkpoint.checkpoint_id());
  line("state", StateName(checkpoint.state()) + (checkpoint.detail().empty() ? "" : ": " + checkpoint.detail()));
  line("step", fmt::format("{} ({} samples)", checkpoint.step(), checkpoint.consumed_samples()));
  line("path", fmt::format("{} on {}", checkpoint.path(), checkpoint.node_id()));
  line("size", recipes::FormatBytes(checkpoint.bytes()));
  line("optimizer", checkpoint.has_optimizer_state() ? "with optimizer state" : "weights only");
  line("pinned", checkpoint.pinned() ? "yes" : "no");
  line("job", fmt::format("{}, attempt {}", checkpoint.job_id(), checkpoint.attempt()));
  line("parent", checkpoint.parent_checkpoint_id());
  line("committed", FormatTime(checkpoint.commit_time()));
  line("verified", FormatTime(checkpoint.verify_time()));
  line("manifest", checkpoint.manifest_hash());
  return text;
}

void AddList(CLI::App* group, Session* session) {
  struct Flags {
    std::string run, job;
    bool deleted = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = group->add_subcommand("ls", "List committed checkpoints");
  command->add_option("RUN", flags->run, "Of this run");
  command->add_option("--job", flags->job, "Of this job");
  command->add_flag("-a,--all", flags->deleted, "Deleted ones too");
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      v1::ListCheckpointsRequest request;
      request.set_run_name(flags->run);
      request.set_job_id(flags->job);
      request.set_include_deleted(flags->deleted);
      MBCTL_ASSIGN_OR_FAIL(const auto checkpoints, *session, client->ListCheckpoints(request));
      v1::ListCheckpointsResponse all;
      std::string names;
      for (const v1::Checkpoint& checkpoint : checkpoints) {
        *all.add_checkpoints() = checkpoint;
        names += (names.empty() ? "" : "\n") + checkpoint.checkpoint_id();
      }
      return session->Print(all, names, [&] { return CheckpointTable(checkpoints); });
    };
  });
}

void AddVerify(CLI::App* group, Session* session) {
  auto id = std::make_shared<std::string>();
  auto* command = group->add_subcommand("verify", "Read every tensor and compare its checksum; exit code 9 for damage");
  command->add_option("CKPT", *id, "Checkpoint id, RUN@STEP")->required();
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const auto verified, *session, client->VerifyCheckpoint(*id));
      session->Print(verified, *id, [&] {
        return fmt::format("{}  {}  {} tensors, {} read\n", *id, StateName(verified.checkpoint().state()), verified.tensors(),
                           recipes::FormatBytes(verified.bytes_read()));
      });
      return verified.checkpoint().state() == v1::CHECKPOINT_STATE_CORRUPT ? client::kExitDataLoss : client::kExitOk;
    };
  });
}

// A command on one or more checkpoints that answers with each.
void AddEach(CLI::App* group, Session* session, const char* name, const char* help,
             const std::function<absl::StatusOr<v1::Checkpoint>(client::Client*, const std::string&)>& call) {
  auto ids = std::make_shared<std::vector<std::string>>();
  auto* command = group->add_subcommand(name, help);
  command->add_option("CKPT", *ids, "Checkpoint ids, RUN@STEP")->required();
  const bool details = std::string(name) == "get";
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      for (const std::string& id : *ids) {
        MBCTL_ASSIGN_OR_FAIL(const v1::Checkpoint checkpoint, *session, call(client, id));
        session->Print(checkpoint, checkpoint.checkpoint_id(), [&] {
          if (details) return DescribeCheckpoint(checkpoint);
          return fmt::format("{}  {}{}\n", checkpoint.checkpoint_id(), StateName(checkpoint.state()),
                             checkpoint.pinned() ? "  pinned" : "");
        });
      }
      return client::kExitOk;
    };
  });
}

void AddRemove(CLI::App* group, Session* session) {
  struct Flags {
    std::vector<std::string> ids;
    bool yes = false, force = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = group->add_subcommand("rm", "Delete checkpoints");
  command->add_option("CKPT", flags->ids, "Checkpoint ids, RUN@STEP")->required();
  command->add_flag("-y,--yes", flags->yes, "Do not ask");
  command->add_flag("--force", flags->force, "Also the last checkpoint of a run; never a pinned one");
  command->callback([=] {
    session->action = [=]() -> int {
      if (!session->Confirm(fmt::format("delete {} checkpoint(s)", flags->ids.size()), flags->yes)) return client::kExitInvalid;
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      for (const std::string& id : flags->ids) {
        MBCTL_ASSIGN_OR_FAIL(const v1::Checkpoint checkpoint, *session, client->DeleteCheckpoint(id, flags->force));
        session->Print(checkpoint, id, [&] { return fmt::format("{}  {}\n", id, StateName(checkpoint.state())); });
      }
      return client::kExitOk;
    };
  });
}

}  // namespace

void AddCheckpoints(CLI::App* app, Session* session) {
  auto* group = app->add_subcommand("ckpt", "Committed checkpoints: ls, get, verify, pin, unpin, rm");
  group->require_subcommand(1);
  AddList(group, session);
  AddEach(group, session, "get", "Everything about a checkpoint",
          [](client::Client* client, const std::string& id) { return client->GetCheckpoint(id); });
  AddVerify(group, session);
  AddEach(group, session, "pin", "Keep a checkpoint whatever the retention rule says",
          [](client::Client* client, const std::string& id) { return client->PinCheckpoint(id, true); });
  AddEach(group, session, "unpin", "Undo pin",
          [](client::Client* client, const std::string& id) { return client->PinCheckpoint(id, false); });
  AddRemove(group, session);
}

}  // namespace mbridge::mbctl
