#include "server/auth/credentials.h"

#include <fmt/format.h>
#include <grpcpp/security/server_credentials.h>

#include <fstream>
#include <sstream>

#include "proto/rpc/local_address.h"
#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || text.str().find("-----BEGIN") == std::string::npos) {
    return absl::FailedPreconditionError(fmt::format("{} is not a readable PEM file", path));
  }
  return text.str();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> CredentialsFor(const std::string& address, const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty() || (!files.client_ca.empty() && files.certificate.empty())) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key belong together, and --tls-client-ca needs both");
  }
  if (address.starts_with("unix:")) return grpc::InsecureServerCredentials();
  if (files.certificate.empty()) {
    if (IsLocalAddress(address)) return grpc::InsecureServerCredentials();
    return absl::FailedPreconditionError(fmt::format(
        "--listen {} can be reached from other machines, so it needs --tls-cert and --tls-key; or listen on 127.0.0.1", address));
  }
  grpc::SslServerCredentialsOptions options(files.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  grpc::SslServerCredentialsOptions::PemKeyCertPair pair;
  MB_ASSIGN_OR_RETURN(pair.private_key, ReadPem(files.key));
  MB_ASSIGN_OR_RETURN(pair.cert_chain, ReadPem(files.certificate));
  options.pem_key_cert_pairs.push_back(std::move(pair));
  if (!files.client_ca.empty()) {
    MB_ASSIGN_OR_RETURN(options.pem_root_certs, ReadPem(files.client_ca));
  }
  return grpc::SslServerCredentials(options);
}

}  // namespace mbridge::server
