// logs JOB [-f] [--rank N].
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/interrupt.h"
#include "client/mbctl/session.h"

namespace mbridge::mbctl {
namespace {

struct LogFlags {
  std::string job;
  bool follow = false, tail = false;
  int rank = 0, attempt = 0;
};

int PrintLog(Session* session, const LogFlags& flags) {
  MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
  MBCTL_ASSIGN_OR_FAIL(const v1::Job job, *session, FindJob(client, flags.job));
  const client::Client::LogQuery query = {
      .job_id = job.job_id(), .attempt = flags.attempt, .rank = flags.rank, .offset = flags.tail ? -1 : 0};
  int last_attempt = 0;
  const auto sink = [&](const std::string& bytes, int attempt) {
    if (last_attempt != 0 && attempt != last_attempt) session->Say(fmt::format("attempt {}", attempt));
    last_attempt = attempt;
    session->out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    session->out.flush();
  };
  if (!flags.follow) {
    const absl::Status status = client->ReadLog(query, sink);
    return status.ok() ? client::kExitOk : session->Fail(status);
  }
  std::stop_source stop;
  absl::StatusOr<v1::StreamEnd> end = absl::UnknownError("");
  {
    const Interrupt interrupt([&stop](int) { stop.request_stop(); });
    end = client->FollowLog(query, sink, stop.get_token());
  }
  if (stop.stop_requested() && !end.ok()) {
    SayDetached(session, job.job_id(), fmt::format("mbctl logs -f {}", job.job_id()));
    return client::kExitInterrupted;
  }
  if (!end.ok()) return session->Fail(end.status());
  // The end of one attempt says nothing about the job.
  const bool of_job = flags.attempt == 0 || end->state() >= v1::JOB_STATE_SUCCEEDED;
  return of_job ? client::ExitCodeOf(*end) : client::kExitOk;
}

}  // namespace

void AddLogs(CLI::App* app, Session* session) {
  auto flags = std::make_shared<LogFlags>();
  auto* command = app->add_subcommand("logs", "Print what a rank wrote to stdout and stderr");
  command->add_option("JOB", flags->job, "Job id or run name")->required();
  command->add_flag("-f,--follow", flags->follow,
                    "Until the job (with --attempt: the attempt) has ended; the exit code is the job's");
  command->add_option("--rank", flags->rank, "Rank")->check(CLI::NonNegativeNumber)->capture_default_str();
  command->add_option("--attempt", flags->attempt, "Attempt; 0: the newest")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--tail", flags->tail, "Begin with the last 64 KiB");
  command->callback([=] { session->action = [=] { return PrintLog(session, *flags); }; });
}

}  // namespace mbridge::mbctl
