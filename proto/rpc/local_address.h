// Which gRPC addresses stay on this machine: the rule behind "plain text only on loopback or a unix socket", the same for the
// server that listens and the client that connects. Pure function, thread-safe.
#pragma once

#include <string>

namespace mbridge {

// "unix:PATH", "localhost:PORT", an IPv4 address in 127.0.0.0/8, "[::1]:PORT". A host name such as 127.example.org is not local.
bool IsLocalAddress(const std::string& address);

}  // namespace mbridge
