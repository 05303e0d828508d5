// Checks that run while the host waits for the GPU: a collective whose peer died never ends by itself.
#pragma once

#include <functional>

namespace mbridge::cuda {

// `check` gets the seconds waited so far and throws EngineError to end the wait; then all checks are called once more, with
// infinity. Called from the waiting thread, about every millisecond. One thread of a process drives the GPU: not thread-safe.
// Returns a key for RemoveWatch.
int AddWatch(std::function<void(double)> check);
void RemoveWatch(int key);

// Runs every check.
void RunWatches(double waited_seconds);
bool HasWatches();

}  // namespace mbridge::cuda
