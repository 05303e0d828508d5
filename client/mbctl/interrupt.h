// Ctrl-C while a command follows a job: a callback instead of the end of the process.
#pragma once

#include <functional>
#include <thread>

namespace mbridge::mbctl {

// While it lives, SIGINT calls `on_interrupt(count)` from a thread of its own, count = 1, 2, …; a third one ends the
// process with exit code 130, whatever hangs. At most one at a time in a process.
class Interrupt {
 public:
  explicit Interrupt(std::function<void(int count)> on_interrupt);
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;

 private:
  std::jthread thread_;
};

}  // namespace mbridge::mbctl
