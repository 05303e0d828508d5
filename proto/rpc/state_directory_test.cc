#include "proto/rpc/state_directory.h"

#include <cstdlib>
#include <map>

#include <gtest/gtest.h>
#include <unistd.h>

namespace mbridge {
namespace {

Environment Variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

TEST(StateDirectory, ComesFromTheEnvironment) {
  EXPECT_EQ(DefaultStateDirectory(Variables({{"MB_STATE_DIR", "/x"}, {"XDG_STATE_HOME", "/y"}, {"HOME", "/z"}})), "/x");
  const bool root = geteuid() == 0;
  const auto expected = [&](const char* path) { return root ? "/var/lib/mbridge" : path; };
  EXPECT_EQ(DefaultStateDirectory(Variables({{"MB_STATE_DIR", ""}, {"XDG_STATE_HOME", "/y"}, {"HOME", "/z"}})),
            expected("/y/mbridge"));
  EXPECT_EQ(DefaultStateDirectory(Variables({{"XDG_STATE_HOME", ""}, {"HOME", "/z"}})), expected("/z/.local/state/mbridge"));
  EXPECT_EQ(DefaultStateDirectory(Variables({})), expected("./.local/state/mbridge"));
}

TEST(StateDirectory, ReadsTheProcessEnvironment) {
  setenv("MB_STATE_DIR", "/somewhere", 1);
  EXPECT_EQ(DefaultStateDirectory(ProcessEnvironment), "/somewhere");
  unsetenv("MB_STATE_DIR");
  EXPECT_FALSE(ProcessEnvironment("MB_STATE_DIR").has_value());
}

}  // namespace
}  // namespace mbridge
