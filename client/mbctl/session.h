// What every command works with: streams, terminal, connection and output format.
#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/lib/client.h"
#include "client/lib/connection.h"
#include "client/mbctl/terminal.h"
#include "proto/rpc/status_details.h"

namespace google::protobuf {
class Message;
}

namespace mbridge::mbctl {

class Session {
 public:
  Session(std::ostream& out, std::ostream& err, Terminal terminal, client::Environment environment)
      : out(out), err(err), terminal(terminal), environment(std::move(environment)) {}

  std::ostream& out;  // Data.
  std::ostream& err;  // Prose and progress.
  Terminal terminal;
  client::Environment environment;
  client::ConnectionFlags connection;
  std::string format = "table";  // -o: table, json, yaml or name.
  bool quiet = false;
  // Set by the parsed subcommand; returns the exit code.
  std::function<int()> action;
  // Changes the options before the connection is made; for tests.
  std::function<void(client::ConnectionOptions*)> adjust_connection;

  // The connection, made at the first call.
  absl::StatusOr<client::Client*> Connect();

  // A line of prose on stderr, unless --quiet. Thread-safe.
  void Say(const std::string& line);
  // Prints what went wrong and what to do next on stderr; returns the exit code. Thread-safe.
  int Fail(const absl::Status& status);
  // Exit code 2 with a message of our own.
  int Usage(const std::string& message);
  // One object in the chosen format (`table` text for people, `name` for scripts). Returns 0.
  int Print(const google::protobuf::Message& message, const std::string& name, const std::function<std::string()>& table);
  // True after a yes on the terminal; without a terminal or --yes false, with the reason on stderr.
  bool Confirm(const std::string& question, bool yes);

  bool json() const { return format == "json"; }
  // Guards `out` and `err` where a command has several threads.
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  std::unique_ptr<client::Client> client_;
  std::recursive_mutex mutex_;
  std::string last_retry_;
  std::chrono::steady_clock::time_point last_retry_time_;
};

// The error text of Fail, without the program's name; several lines.
std::string DescribeError(const absl::Status& status);

// The job that a command line names: a job id, or a run name (its newest job).
absl::StatusOr<v1::Job> FindJob(client::Client* client, const std::string& job_or_run);

// "90", "90s", "10m", "2h", "1d" in seconds; INVALID_ARGUMENT for anything else, zero or less.
absl::StatusOr<double> ParseDuration(const std::string& text);

}  // namespace mbridge::mbctl

// Inside a command: x = value of a StatusOr, or prints the error and returns its exit code.
#define MBCTL_ASSIGN_OR_FAIL_IMPL(var, lhs, session, expr)                                     \
  auto var = (expr);                                  /* NOLINT(bugprone-macro-parentheses) */ \
  if (!var.ok()) return (session).Fail(var.status()); /* NOLINT(bugprone-macro-parentheses) */ \
  lhs = std::move(var).value()                        /* NOLINT(bugprone-macro-parentheses): both may be declarations */
#define MBCTL_ASSIGN_OR_FAIL(lhs, session, expr) \
  MBCTL_ASSIGN_OR_FAIL_IMPL(MB_CONCAT(mbctl_status_or_, __LINE__), lhs, session, expr)
