#include "server/auth/credentials.h"

#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <gtest/gtest.h>

namespace mbridge::server {
namespace {

TEST(Credentials, PlainTextIsForThisMachineOnly) {
  for (const char* local : {"unix:/run/x.sock", "127.0.0.1:7070", "localhost:1", "[::1]:1", "127.1.2.3:0"}) {
    EXPECT_TRUE(CredentialsFor(local, {}).ok()) << local;
  }
  for (const char* open : {"0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "example.org:7070"}) {
    const auto refused = CredentialsFor(open, {});
    EXPECT_FALSE(refused.ok()) << open;
    EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("--tls-cert"));
  }
}

TEST(Credentials, HalfAPairAndMissingFilesAreRefused) {
  EXPECT_FALSE(CredentialsFor("127.0.0.1:1", {.certificate = "a", .key = "", .client_ca = ""}).ok());
  EXPECT_FALSE(CredentialsFor("127.0.0.1:1", {.certificate = "", .key = "", .client_ca = "ca"}).ok());
  const auto missing = CredentialsFor("127.0.0.1:1", {.certificate = "/nowhere/c", .key = "/nowhere/k", .client_ca = ""});
  EXPECT_THAT(std::string(missing.status().message()), ::testing::HasSubstr("/nowhere/k"));
}

}  // namespace
}  // namespace mbridge::server
