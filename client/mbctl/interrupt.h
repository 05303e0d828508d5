// Ctrl-C while a command follows a job or runs ranks: a callback instead of the end of the process.
#pragma once

#include <signal.h>

#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace mbridge::mbctl {

// While it lives, SIGINT (or any of `signals`) calls `on_interrupt(count)` from a thread of its own, count = 1, 2, …; a third one
// ends the process with exit code 130, whatever hangs. At most one at a time in a process.
class Interrupt {
 public:
  explicit Interrupt(std::function<void(int count)> on_interrupt, const std::vector<int>& signals = {SIGINT});
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;

 private:
  std::vector<std::pair<int, struct sigaction>> previous_;  // What the signals did before.
  std::jthread thread_;
};

}  // namespace mbridge::mbctl
