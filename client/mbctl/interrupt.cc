#include "client/mbctl/interrupt.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace mbridge::mbctl {
namespace {

constexpr int kForcedExit = 3;
constexpr uint64_t kQuit = uint64_t{1} << 32;  // Added to the counter to end the thread.

std::atomic<int> event_fd{-1};
std::atomic<int> interrupts{0};

void OnSignal(int) {
  if (interrupts.fetch_add(1) + 1 >= kForcedExit) _exit(130);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_fd, &one, sizeof(one));
}

}  // namespace

Interrupt::Interrupt(std::function<void(int)> on_interrupt, const std::vector<int>& signals) {
  interrupts = 0;
  event_fd = eventfd(0, EFD_CLOEXEC);
  struct sigaction action {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : signals) {
    struct sigaction previous {};
    sigaction(signal, &action, &previous);
    previous_.emplace_back(signal, previous);
  }
  thread_ = std::jthread([on_interrupt = std::move(on_interrupt)] {
    int told = 0;
    for (uint64_t value = 0; read(event_fd, &value, sizeof(value)) == sizeof(value);) {
      if (value >= kQuit) return;
      while (told < interrupts) on_interrupt(++told);
    }
  });
}

Interrupt::~Interrupt() {
  for (const auto& [signal, previous] : previous_) sigaction(signal, &previous, nullptr);
  [[maybe_unused]] const ssize_t written = write(event_fd, &kQuit, sizeof(kQuit));
  thread_.join();
  close(event_fd);
}

}  // namespace mbridge::mbctl
