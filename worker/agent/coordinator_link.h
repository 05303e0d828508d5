// The connection to the coordinator: one Sync at a time, without blocking the caller's supervision.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"

namespace mbridge::agent {

struct LinkOptions {
  std::string target;  // gRPC target: unix:/path, host:port, dns:///host:port.
  // PEM files. `tls_ca` makes the connection TLS; certificate and key identify this agent and come together.
  std::string tls_ca;
  std::string tls_cert;
  std::string tls_key;
};

// One thread may use it.
class CoordinatorLink {
 public:
  // INVALID_ARGUMENT names the option. Does not connect yet.
  static absl::StatusOr<std::unique_ptr<CoordinatorLink>> Open(const LinkOptions& options);
  ~CoordinatorLink();  // Cancels a call in flight and waits for its end.
  CoordinatorLink(const CoordinatorLink&) = delete;
  CoordinatorLink& operator=(const CoordinatorLink&) = delete;

  bool busy() const { return call_ != nullptr; }
  // Only while not busy.
  void StartSync(const v1::SyncRequest& request, std::chrono::milliseconds deadline);
  // Waits up to `limit` for the end of the call; without a call it sleeps.
  void Wait(std::chrono::milliseconds limit);
  // The answer of a call that has ended, once. After a failure the next call uses a new connection: a dead one is not
  // waited for, and the caller's back-off is the only one.
  std::optional<absl::StatusOr<v1::SyncResponse>> TakeAnswer();

 private:
  struct Connection;
  struct Call;

  explicit CoordinatorLink(LinkOptions options);
  absl::Status LoadCredentials();
  void Connect();

  const LinkOptions options_;
  std::unique_ptr<Connection> connection_;
  std::unique_ptr<Call> call_;
};

}  // namespace mbridge::agent
