#include "client/lib/connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace mbridge::client {
namespace {

Environment Variables(const std::map<std::string, std::string>& values) {
  return [values](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

class ConnectionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::temp_directory_path() / ("mb-connection-" + std::to_string(getpid()));
    std::filesystem::create_directories(directory_ / "mbctl");
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  void WriteConfig(const std::string& text) { std::ofstream(directory_ / "mbctl/config.yaml") << text; }
  std::string Message(std::map<std::string, std::string> variables, const ConnectionFlags& flags = {}) {
    variables["XDG_CONFIG_HOME"] = directory_;
    return std::string(LoadConnectionOptions(flags, Variables(variables)).status().message());
  }
  std::filesystem::path directory_;
};

constexpr const char* kTwoContexts = R"(
current-context: lab
contexts:
  lab: {server: "lab.example:7070", ca: /etc/lab-ca.pem}
  near: {server: /run/near.sock}
)";

TEST_F(ConnectionTest, FlagsOverEnvironmentOverFile) {
  WriteConfig(kTwoContexts);
  std::map<std::string, std::string> variables = {{"XDG_CONFIG_HOME", directory_}};
  auto options = LoadConnectionOptions({}, Variables(variables));
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->server, "lab.example:7070");
  EXPECT_TRUE(options->tls);
  EXPECT_EQ(options->ca_file, "/etc/lab-ca.pem");

  variables["MBCTL_CONTEXT"] = "near";
  EXPECT_EQ(LoadConnectionOptions({}, Variables(variables))->server, "unix:/run/near.sock");
  variables["MBCTL_SERVER"] = ":9";
  EXPECT_EQ(LoadConnectionOptions({}, Variables(variables))->server, "127.0.0.1:9");
  ConnectionFlags flags;
  flags.server = "host";
  options = LoadConnectionOptions(flags, Variables(variables));
  EXPECT_EQ(options->server, "host:7070");
  EXPECT_EQ(options->origin, "--server");
}

TEST_F(ConnectionTest, DefaultIsTheSocketOfTheStateDirectoryOrLoopback) {
  const auto variables = Variables({{"XDG_CONFIG_HOME", directory_}, {"MB_STATE_DIR", directory_}});
  EXPECT_EQ(LoadConnectionOptions({}, variables)->server, "127.0.0.1:7070");
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = (directory_ / "coordinator.sock").string();
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(LoadConnectionOptions({}, variables)->server, "unix:" + path);
  close(fd);
}

TEST_F(ConnectionTest, ReconnectTimeComesFromTheEnvironment) {
  const auto options = LoadConnectionOptions({}, Variables({{"XDG_CONFIG_HOME", directory_}, {"MBCTL_RECONNECT_SECONDS", "2"}}));
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->lost_after, std::chrono::seconds(2));
  EXPECT_EQ(options->retry_for, std::chrono::seconds(2));
}

TEST_F(ConnectionTest, NamesWhatIsWrong) {
  EXPECT_NE(Message({{"MBCTL_CONTEXT", "lab"}}).find("'lab' was asked for"), std::string::npos);
  EXPECT_NE(Message({{"MBCTL_CONFIG", "/nowhere.yaml"}}).find("/nowhere.yaml does not exist"), std::string::npos);
  EXPECT_NE(Message({{"MBCTL_TLS", "yes"}}).find("MBCTL_TLS=yes"), std::string::npos);
  EXPECT_NE(Message({{"MBCTL_RECONNECT_SECONDS", "soon"}}).find("MBCTL_RECONNECT_SECONDS=soon"), std::string::npos);
  EXPECT_NE(Message({{"MBCTL_CERT", "a.pem"}}).find("both --cert and --key"), std::string::npos);
  ConnectionFlags flags;
  flags.tls = false;
  EXPECT_NE(Message({{"MBCTL_CA", "a.pem"}}, flags).find("switched off"), std::string::npos);
  WriteConfig(kTwoContexts);
  EXPECT_NE(Message({{"MBCTL_CONTEXT", "far"}}).find("it has: lab, near"), std::string::npos);
  WriteConfig("current-context: a\ncontexts: {a: {sever: x}}");
  EXPECT_NE(Message({}).find("unknown key 'sever'"), std::string::npos);
  WriteConfig("contexts: [");
  EXPECT_NE(Message({}).find("config.yaml"), std::string::npos);
}

}  // namespace
}  // namespace mbridge::client
