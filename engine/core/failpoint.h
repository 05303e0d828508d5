// Named places where a test makes a process die, stall or meet an error. Free of cost unless MB_FAILPOINTS is set.
//
// MB_FAILPOINTS="name=kill;other=error:28@3;third=sleep:500": `kill` is SIGKILL to the own process, `error:N` lets the place
// fail with errno N, `sleep:MS` waits. `@K` acts at the K-th pass only, otherwise at every pass. Thread-safe.
#pragma once

namespace mbridge {

// The errno to fail with, 0 to go on. Reads MB_FAILPOINTS once a process (tests: ReloadFailpoints).
int Failpoint(const char* name);
// Reads MB_FAILPOINTS again and forgets the passes counted so far.
void ReloadFailpoints();

}  // namespace mbridge

#define MB_FAILPOINT(name) ::mbridge::Failpoint(name)
