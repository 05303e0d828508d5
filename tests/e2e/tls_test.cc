// TLS over TCP: an agent and mbctl with the right certificates are served, others are not.
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <memory>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

struct Identity {
  std::string certificate, key;  // PEM files.
};

// Writes a key and a certificate that signs itself, for localhost and 127.0.0.1.
Identity MakeIdentity(const std::filesystem::path& directory, const std::string& name) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"), EVP_PKEY_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), X509_free);
  X509* x = certificate.get();
  X509_set_version(x, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(x), 1);
  X509_gmtime_adj(X509_getm_notBefore(x), -3600);
  X509_gmtime_adj(X509_getm_notAfter(x), 3600);
  X509_set_pubkey(x, key.get());
  X509_NAME* subject = X509_get_subject_name(x);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(x, subject);
  for (const auto& [extension, value] :
       {std::pair{NID_basic_constraints, "critical,CA:TRUE"}, std::pair{NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1"}}) {
    X509_EXTENSION* made = X509V3_EXT_conf_nid(nullptr, nullptr, extension, value);
    X509_add_ext(x, made, -1);
    X509_EXTENSION_free(made);
  }
  EXPECT_GT(X509_sign(x, key.get(), EVP_sha256()), 0);
  const Identity identity{directory / (name + ".crt"), directory / (name + ".key")};
  FILE* file = fopen(identity.certificate.c_str(), "w");
  EXPECT_EQ(PEM_write_X509(file, x), 1);
  fclose(file);
  file = fopen(identity.key.c_str(), "w");
  EXPECT_EQ(PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr), 1);
  fclose(file);
  return identity;
}

class Tls : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }

  Process StartAgent(const std::string& name, const Arguments& tls) {
    SpawnOptions options = service_.MbctlOptions();  // With the mark by which the fixture finds its processes.
    options.out_path = options.err_path = service_.directory() / (name + ".log");
    Arguments words = {Program("mbagent"), "--coordinator", "localhost:" + Port(), "--state-dir", service_.directory() / name};
    words.insert(words.end(), tls.begin(), tls.end());
    return Process(words, options);
  }
  int Nodes() {
    grpc::ClientContext context;
    v1::ListNodesResponse nodes;
    EXPECT_TRUE(service_.nodes().ListNodes(&context, {}, &nodes).ok());
    return nodes.nodes_size();
  }
  std::string Port() const { return service_.tcp_address().substr(service_.tcp_address().rfind(':') + 1); }
  CommandResult Mbctl(const Arguments& tls) {
    Arguments words = {Program("mbctl"), "--server", "localhost:" + Port(), "ps", "-a"};
    words.insert(words.end(), tls.begin(), tls.end());
    SpawnOptions options = service_.MbctlOptions();
    options.environment["MBCTL_RECONNECT_SECONDS"] = "2";
    return RunCommand(words, options, Seconds(60));
  }

  ScratchDirectory certificates_;
  Identity server_ = MakeIdentity(certificates_.path(), "server");
  Identity client_ = MakeIdentity(certificates_.path(), "client");
  Identity stranger_ = MakeIdentity(certificates_.path(), "stranger");
  Service service_{Service::Options{.extra_arguments = {"--no-local-agent", "--tls-cert", server_.certificate, "--tls-key",
                                                        server_.key, "--tls-client-ca", client_.certificate},
                                    .tcp = true}};
};

TEST_F(Tls, AgentsNeedTheRightCertificates) {
  const Arguments right = {"--tls-ca", server_.certificate, "--tls-cert", client_.certificate, "--tls-key", client_.key};
  std::vector<Process> refused;
  refused.push_back(StartAgent("plain", {}));
  refused.push_back(
      StartAgent("other-ca", {"--tls-ca", stranger_.certificate, "--tls-cert", client_.certificate, "--tls-key", client_.key}));
  refused.push_back(StartAgent(
      "other-client", {"--tls-ca", server_.certificate, "--tls-cert", stranger_.certificate, "--tls-key", stranger_.key}));
  sleep(3);
  EXPECT_EQ(Nodes(), 0);
  for (Process& agent : refused) EXPECT_TRUE(agent.running()) << "it tries again";

  Process agent = StartAgent("right", right);
  ASSERT_TRUE(WaitUntil([this] { return Nodes() == 1; }, Seconds(20))) << ReadFile(service_.directory() / "right.log");
  const std::string id = service_.Submit(TinyJob(3));
  EXPECT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(Tls, ClientsNeedTheRightCertificates) {
  EXPECT_THAT(Mbctl({"--ca", server_.certificate, "--cert", client_.certificate, "--key", client_.key}), Exited(0));
  EXPECT_THAT(Mbctl({}), Exited(7));
  EXPECT_THAT(Mbctl({"--ca", server_.certificate}), Exited(7));
  EXPECT_THAT(Mbctl({"--ca", stranger_.certificate, "--cert", client_.certificate, "--key", client_.key}), Exited(7));
}

}  // namespace
}  // namespace mbridge::e2e
