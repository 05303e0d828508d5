// Where the coordinator is and how to reach it: flags over environment over ~/.config/mbctl/config.yaml over default.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/rpc/state_directory.h"

namespace mbridge::client {

// Everything that a Client needs to know. The times have defaults for people; tests shorten them.
struct ConnectionOptions {
  std::string server;     // gRPC target: "unix:/path", "host:port".
  bool tls = false;       // Implied by ca_file or cert_file.
  std::string ca_file;    // PEM; empty: the system's roots.
  std::string cert_file;  // PEM, client certificate for mutual TLS, with key_file.
  std::string key_file;
  std::string origin;  // Which rule chose `server`, for messages.

  std::chrono::milliseconds call_deadline = std::chrono::seconds(30);  // Of one attempt of a unary call.
  std::chrono::milliseconds retry_for = std::chrono::seconds(5);       // UNAVAILABLE of idempotent unary calls.
  std::chrono::milliseconds silence_limit = std::chrono::seconds(60);  // A stream without any message is dead.
  std::chrono::milliseconds lost_after = std::chrono::seconds(60);     // A follower gives up this long after its last message.
  // Told once per broken connection what happened ("connection to … lost, trying again"). May be called from any
  // thread that uses the client.
  std::function<void(const std::string&)> on_retry;
};

// What the command line said; unset fields fall through to the environment and the file.
struct ConnectionFlags {
  std::optional<std::string> server, context, config_file, ca_file, cert_file, key_file;
  std::optional<bool> tls;
};

using mbridge::Environment;
using mbridge::ProcessEnvironment;

// Environment: MBCTL_SERVER, MBCTL_CONTEXT, MBCTL_CONFIG, MBCTL_TLS (1/true/0/false), MBCTL_CA, MBCTL_CERT, MBCTL_KEY,
// MBCTL_RECONNECT_SECONDS (lost_after; retry_for is at most this long).
// File: `current-context: NAME` and `contexts: {NAME: {server, tls, ca, cert, key}}`.
// INVALID_ARGUMENT for a file that cannot be read, an unknown key in it, an unknown context, a cert without key.
absl::StatusOr<ConnectionOptions> LoadConnectionOptions(const ConnectionFlags& flags,
                                                        const Environment& environment = ProcessEnvironment);

// unix:<state dir>/coordinator.sock where that socket exists, else 127.0.0.1:7070.
std::string DefaultServer(const Environment& environment);

// "/path" and "unix:/path" -> "unix:/path", ":7070" -> "127.0.0.1:7070", "host" -> "host:7070".
std::string NormalizeServer(const std::string& server);

}  // namespace mbridge::client
