// Who may connect how: plain text on unix sockets and loopback only, TLS elsewhere.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ServerCredentials;
}

namespace mbridge::server {

struct TlsFiles {
  std::string certificate, key;  // PEM; both or none.
  std::string client_ca;         // PEM; when set, clients must show a certificate that it signed.
};

// Plain credentials for unix sockets; TLS where files are given; FAILED_PRECONDITION for plain text on an address that
// other machines can reach.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> CredentialsFor(const std::string& address, const TlsFiles& files);

}  // namespace mbridge::server
