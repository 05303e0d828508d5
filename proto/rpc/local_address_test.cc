#include "proto/rpc/local_address.h"

#include <gtest/gtest.h>

namespace mbridge {
namespace {

TEST(LocalAddress, LoopbackAndUnixSocketsOnly) {
  for (const char* local : {"unix:/run/x.sock", "localhost:7070", "127.0.0.1:7070", "127.8.9.10:1", "[::1]:7070"}) {
    EXPECT_TRUE(IsLocalAddress(local)) << local;
  }
  for (const char* remote :
       {"127.evil.example.org:7070", "localhost.example.org:1", "0.0.0.0:7070", "10.0.0.1:7070", "[::]:7070", ""}) {
    EXPECT_FALSE(IsLocalAddress(remote)) << remote;
  }
}

}  // namespace
}  // namespace mbridge
