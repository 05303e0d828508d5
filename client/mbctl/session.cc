#include "client/mbctl/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/output.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {

absl::StatusOr<client::Client*> Session::Connect() {
  if (client_ == nullptr) {
    MB_ASSIGN_OR_RETURN(client::ConnectionOptions options, client::LoadConnectionOptions(connection, environment));
    // Several streams lose one connection together; it is said once.
    options.on_retry = [this](const std::string& what) {
      const std::lock_guard lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      if (what == last_retry_ && now - last_retry_time_ < std::chrono::seconds(5)) return;
      last_retry_ = what;
      last_retry_time_ = now;
      Say(what);
    };
    if (adjust_connection) adjust_connection(&options);
    MB_ASSIGN_OR_RETURN(client_, client::Client::Connect(std::move(options)));
  }
  return client_.get();
}

void Session::Say(const std::string& line) {
  if (quiet) return;
  const std::lock_guard lock(mutex_);
  err << "mbctl: " << line << std::endl;
}

namespace {

// Of a refusal. The table's words for OUT_OF_MEMORY are about a rank that ran.
std::string NextStep(v1::Reason reason, const std::vector<FieldViolation>& violations) {
  const bool lists = std::any_of(violations.begin(), violations.end(), [](const FieldViolation& violation) {
    return violation.description.find("\n  ") != std::string::npos;
  });
  if (reason == v1::REASON_OUT_OF_MEMORY && lists) return "Nothing was started; take one of the lines above.";
  return InfoOf(reason).help();
}

}  // namespace

std::string DescribeError(const absl::Status& status) {
  const v1::Reason reason = ReasonOf(status);
  const auto violations = FieldViolationsOf(status);
  std::string text;
  if (violations.empty()) {
    text = std::string(status.message());
    if (text.empty()) text = std::string(absl::StatusCodeToString(status.code()));
  } else {
    text = violations.size() == 1 ? "the request has an error:" : fmt::format("the request has {} errors:", violations.size());
    for (const FieldViolation& violation : violations) {
      text += fmt::format("\n  {}: {}", violation.field, violation.description);
    }
    // What the message says beyond the violations.
    const std::string message(status.message());
    if (message.find(violations[0].description) == std::string::npos && !message.empty()) text += "\n" + message;
  }
  if (reason != v1::REASON_UNSPECIFIED) {
    text += fmt::format("\nreason: {}", ReasonName(reason));
    if (const std::string next = NextStep(reason, violations); !next.empty()) text += fmt::format("\nnext: {}", next);
  } else if (status.code() == absl::StatusCode::kUnavailable) {
    text +=
        "\nnext: start a coordinator with `mbcoordinator --state-dir DIR`, or name its address with --server or "
        "MBCTL_SERVER; one that wants TLS needs --ca (and --cert, --key).";
  }
  return text;
}

int Session::Fail(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  err << "mbctl: " << Colored(terminal, "31", "error:") << ' ' << DescribeError(status) << std::endl;
  return client::ExitCodeOf(status);
}

int Session::Usage(const std::string& message) {
  const std::lock_guard lock(mutex_);
  err << "mbctl: " << Colored(terminal, "31", "error:") << ' ' << message << std::endl;
  return client::kExitInvalid;
}

int Session::Print(const google::protobuf::Message& message, const std::string& name, const std::function<std::string()>& table) {
  const std::lock_guard lock(mutex_);
  if (format == "json") {
    out << ToJson(message, true);
  } else if (format == "yaml") {
    out << ToYaml(message);
  } else if (format == "name") {
    if (!name.empty()) out << name << '\n';
  } else {
    out << table();
  }
  out.flush();
  return client::kExitOk;
}

bool Session::Confirm(const std::string& question, bool yes) {
  if (yes) return true;
  if (!terminal.in_is_terminal || !terminal.err_is_terminal) {
    Usage(question + " needs --yes where there is no terminal to ask on");
    return false;
  }
  err << question << "? [y/N] " << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  if (answer == "y" || answer == "yes") return true;
  Say("nothing was done");
  return false;
}

absl::StatusOr<v1::Job> FindJob(client::Client* client, const std::string& job_or_run) {
  auto job = client->GetJob(job_or_run);
  if (job.ok() || !absl::IsNotFound(job.status())) return job;
  auto jobs = client->ListJobs("run_name=" + job_or_run, 1);
  if (!jobs.ok() || jobs->empty()) return job.status();
  // The list leaves resolved values out.
  return client->GetJob(jobs->front().job_id());
}

absl::StatusOr<double> ParseDuration(const std::string& text) {
  size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  const std::string unit = text.substr(used);
  const double factor = unit.empty() || unit == "s"    ? 1
                        : unit == "m" || unit == "min" ? 60
                        : unit == "h"                  ? 3600
                        : unit == "d"                  ? 86400
                                                       : 0;
  if (used == 0 || factor == 0 || !(value > 0) || !std::isfinite(value)) {
    return absl::InvalidArgumentError(fmt::format("'{}' is not a time; write 90s, 10m, 2h or 1d", text));
  }
  return value * factor;
}

}  // namespace mbridge::mbctl
