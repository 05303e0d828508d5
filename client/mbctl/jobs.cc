// ps, get, describe, cancel.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/format/training_line.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

std::string StateName(v1::JobState state) { return StripPrefix(v1::JobState_Name(state), "JOB_STATE_"); }

std::string ReasonText(v1::Reason reason) { return reason == v1::REASON_UNSPECIFIED ? "-" : ReasonName(reason); }

std::string LossText(const v1::MetricPoint& point) {
  if (point.step() == 0) return "-";
  return std::isnan(point.lm_loss()) ? "NaN" : fmt::format("{:.4f}", point.lm_loss());
}

std::string JobTable(const std::vector<v1::Job>& jobs) {
  Table table({"JOB", "RUN", "STATE", "REASON", "STEP", "LOSS", "RANKS", "RECIPE", "AGE"});
  for (const v1::Job& job : jobs) {
    const v1::MetricPoint& point = job.progress();
    table.Add({job.job_id(), job.run_name(), StateName(job.state()), ReasonText(job.reason()),
               point.total_steps() > 0 ? fmt::format("{}/{}", point.step(), point.total_steps()) : "-", LossText(point),
               fmt::format("{}", job.resolved().ranks()), job.spec().recipe(), FormatAge(job.create_time())});
  }
  return table.Text();
}

std::string DescribeAttempt(const v1::Attempt& attempt) {
  std::string text = fmt::format("  attempt {}  {} .. {}  after step {}, last step {}  {}\n", attempt.attempt(),
                                 FormatTime(attempt.start_time()), FormatTime(attempt.end_time()), attempt.first_step(),
                                 attempt.last_step(), ReasonText(attempt.reason()));
  if (!attempt.detail().empty()) text += "    " + attempt.detail() + "\n";
  if (!attempt.from_checkpoint_id().empty()) text += "    from checkpoint " + attempt.from_checkpoint_id() + "\n";
  for (const v1::RankPlacement& place : attempt.placement()) {
    text += fmt::format("    rank {} on {} ({})\n", place.rank(), place.node_id(),
                        place.gpu_uuid().empty() ? fmt::format("CPU, {} threads", place.threads()) : place.gpu_uuid());
  }
  for (const v1::RankEnd& end : attempt.rank_ends()) {
    text += fmt::format("    rank {} ended: {} ({}){}\n", end.rank(), ReasonText(end.reason()),
                        end.signal() != 0 ? fmt::format("signal {}", end.signal()) : fmt::format("exit code {}", end.exit_code()),
                        end.detail().empty() ? "" : " " + end.detail());
  }
  return text;
}

std::string DescribeJob(const v1::Job& job) {
  std::string text;
  const auto line = [&text](const std::string& name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<12} {}\n", name, value);
  };
  line("job", job.job_id());
  line("run", fmt::format("{} in {}", job.run_name(), job.run_directory()));
  line("state", StateName(job.state()) + (job.cancel_requested() ? ", cancel requested" : ""));
  line("reason", job.reason() == v1::REASON_UNSPECIFIED ? "" : ReasonText(job.reason()));
  line("", InfoOf(job.reason()).help());
  line("detail", job.detail());
  if (job.state() == v1::JOB_STATE_QUEUED) line("queue", fmt::format("position {}", job.queue_position()));
  line("recipe", job.spec().recipe());
  line("ranks", fmt::format("{} (data parallel {})", job.resolved().ranks(), job.resolved().data_parallel_size()));
  line("priority", fmt::format("{}", job.spec().priority()));
  line("hash", job.resolved().config_hash());
  line("created", FormatTime(job.create_time()));
  line("started", FormatTime(job.start_time()));
  line("ended", FormatTime(job.end_time()));
  line("owner", job.spec().owner());
  for (const auto& [key, value] : job.spec().labels()) line("label", key + "=" + value);
  if (job.progress().step() > 0) line("progress", FormatTrainingLine(job.progress()).substr(1));
  text += "\noverrides\n";
  for (const std::string& override_line : job.spec().overrides()) text += "  " + override_line + "\n";
  if (job.spec().overrides().empty()) text += "  none\n";
  if (!job.resolved().changes().empty()) text += "\nautomatic changes\n";
  for (const v1::AutomaticChange& change : job.resolved().changes()) {
    text += fmt::format("  {}: {} -> {} ({})\n", change.key(), change.old_value(), change.new_value(), change.why());
  }
  text += "\nattempts\n";
  for (const v1::Attempt& attempt : job.attempts()) text += DescribeAttempt(attempt);
  if (job.attempts().empty()) text += "  none\n";
  return text;
}

void AddPs(CLI::App* app, Session* session) {
  struct Flags {
    bool all = false;
    int limit = 50;
    std::string filter;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("ps", "List jobs, newest first; without -a those that have not ended");
  command->add_flag("-a,--all", flags->all, "Ended jobs too");
  command->add_option("--limit", flags->limit, "At most this many")->check(CLI::Range(1, 100000))->capture_default_str();
  command->add_option("--filter", flags->filter, "Terms joined by AND: state=RUNNING, owner=x, recipe=x, run_name=x, label.k=v");
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      std::string filter = flags->filter;
      if (!flags->all && filter.find("state=") == std::string::npos) filter += filter.empty() ? "live=true" : " AND live=true";
      MBCTL_ASSIGN_OR_FAIL(const auto jobs, *session, client->ListJobs(filter, flags->limit));
      v1::ListJobsResponse all;
      std::string names;
      for (const v1::Job& job : jobs) {
        *all.add_jobs() = job;
        names += (names.empty() ? "" : "\n") + job.job_id();
      }
      if (jobs.empty() && session->format == "table") {
        session->Say(flags->all ? "no jobs" : "no live jobs; -a lists ended ones too");
      }
      return session->Print(all, names, [&] { return JobTable(jobs); });
    };
  });
}

void AddGet(CLI::App* app, Session* session) {
  for (const bool describe : {false, true}) {
    auto job = std::make_shared<std::string>();
    auto* command = describe ? app->add_subcommand("describe", "Everything about a job: attempts, ranks, changes, progress")
                             : app->add_subcommand("get", "A job on one line, or whole with -o json|yaml");
    command->add_option("JOB", *job, "Job id or run name")->required();
    command->callback([=] {
      session->action = [=]() -> int {
        MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
        MBCTL_ASSIGN_OR_FAIL(const v1::Job found, *session, FindJob(client, *job));
        return session->Print(found, found.job_id(), [&] { return describe ? DescribeJob(found) : JobTable({found}); });
      };
    });
  }
}

int CancelOne(Session* session, client::Client* client, const std::string& name, bool kill) {
  MBCTL_ASSIGN_OR_FAIL(const v1::Job found, *session, FindJob(client, name));
  MBCTL_ASSIGN_OR_FAIL(const v1::Job job, *session, client->CancelJob(found.job_id(), kill));
  session->Print(job, job.job_id(), [&] { return fmt::format("{}  {}\n", job.job_id(), StateName(job.state())); });
  return client::kExitOk;
}

void AddCancel(CLI::App* app, Session* session) {
  struct Flags {
    std::vector<std::string> jobs;
    bool kill = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("cancel", "Stop jobs: they finish their step and save where saving is on");
  command->add_option("JOB", flags->jobs, "Job ids or run names")->required();
  command->add_flag("--kill", flags->kill, "At once, without saving");
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      int first_failure = client::kExitOk;
      for (const std::string& name : flags->jobs) {  // A wrong name must not leave the others running.
        const int code = CancelOne(session, client, name, flags->kill);
        if (first_failure == client::kExitOk) first_failure = code;
      }
      return first_failure;
    };
  });
}

}  // namespace

void AddJobs(CLI::App* app, Session* session) {
  AddPs(app, session);
  AddGet(app, session);
  AddCancel(app, session);
}

}  // namespace mbridge::mbctl
