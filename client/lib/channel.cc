#include "client/lib/channel.h"

#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "proto/rpc/local_address.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

constexpr int kKeepaliveMs = 30'000;  // The server permits a ping every 10 s.
constexpr int kKeepaliveTimeoutMs = 20'000;
constexpr int kConnectTimeoutMs = 10'000;  // A handshake over a slow link or with a busy coordinator takes its time.
constexpr int kMaxAnswerBytes = 64 << 20;  // A resolved configuration or a page of jobs.

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* what) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file || text.str().empty()) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG,
                      fmt::format("cannot read the {} file {}", what, path));
  }
  return text.str();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectionOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);  // gRPC's limit of one attempt, not a pause.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // gRPC's own retries would hide how often and why; ours know which calls are idempotent.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(kMaxAnswerBytes);
  if (IsLocalAddress(options.server)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);

  if (!options.tls) return grpc::CreateCustomChannel(options.server, grpc::InsecureChannelCredentials(), arguments);
  grpc::SslCredentialsOptions ssl;
  if (!options.ca_file.empty()) {
    MB_ASSIGN_OR_RETURN(ssl.pem_root_certs, ReadPem(options.ca_file, "CA"));
  }
  if (!options.cert_file.empty()) {
    MB_ASSIGN_OR_RETURN(ssl.pem_cert_chain, ReadPem(options.cert_file, "certificate"));
    MB_ASSIGN_OR_RETURN(ssl.pem_private_key, ReadPem(options.key_file, "key"));
  }
  return grpc::CreateCustomChannel(options.server, grpc::SslCredentials(ssl), arguments);
}

}  // namespace mbridge::client
