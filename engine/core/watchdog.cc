#include "engine/core/watchdog.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include <fmt/format.h>

namespace mbridge {
namespace {

using Clock = std::chrono::steady_clock;  // One clock for all processes of a machine.

double SecondsBetween(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// What one rank tells its neighbours.
struct alignas(64) Pulse {
  std::atomic<int64_t> beat{0};     // Clock's ticks; 0: never ran here.
  std::atomic<int64_t> entered{0};  // Collectives.
  std::atomic<int64_t> reading{0};  // Clock's ticks when it began to read data; 0: it does not read.
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(Pulse) == 64);

// The pulses of a node's ranks in shared memory; none where the file cannot be had: they only make messages better.
class PulseFile {
 public:
  PulseFile(const std::string& path, int size) {
    if (path.empty()) return;
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    const size_t bytes = sizeof(Pulse) * static_cast<size_t>(size);
    // Allocated, for a store into a hole of a full disk is a SIGBUS.
    if (::posix_fallocate(fd, 0, static_cast<off_t>(bytes)) == 0) {
      void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (memory != MAP_FAILED) pulses_ = {static_cast<Pulse*>(memory), static_cast<size_t>(size)};
    }
    ::close(fd);
  }
  ~PulseFile() {
    if (!pulses_.empty()) ::munmap(pulses_.data(), pulses_.size_bytes());
  }
  PulseFile(const PulseFile&) = delete;
  PulseFile& operator=(const PulseFile&) = delete;

  std::span<Pulse> pulses() const { return pulses_; }

 private:
  std::span<Pulse> pulses_;
};

struct Fault {
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::string detail;
};

// Of the process.
struct State {
  std::mutex mutex;
  int waits = 0;
  bool enqueued = false;
  int reading = 0;  // Threads that read data.
  Clock::time_point reading_since;
  Clock::time_point since;  // The last progress.
  const char* what = "a collective";
  std::string group;
  int64_t entered = 0;
  std::optional<Fault> fault;
  // Of the watchdog that runs; otherwise null.
  const WatchdogOptions* options = nullptr;
  std::span<Pulse> pulses;

  bool under_way() const { return waits > 0 || (enqueued && reading == 0); }
  Pulse* own_pulse() const {
    return options == nullptr || pulses.empty() ? nullptr : &pulses[static_cast<size_t>(options->rank)];
  }
};

State& TheState() {
  static State* const state = new State;  // Never destroyed: the last notes come from static destructors.
  return *state;
}

int64_t TicksOf(Clock::time_point time) { return time.time_since_epoch().count(); }
Clock::time_point TimeOf(int64_t ticks) { return Clock::time_point(Clock::duration(ticks)); }

std::string JoinRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) text += fmt::format("{}{}", i == 0 ? " " : ", ", ranks[i]);
  return text;
}

std::string LateRanksLocked(const State& state) {
  if (state.options == nullptr) return "";
  const Clock::time_point now = Clock::now();
  const double silent = std::max(2.0, state.options->timeout_seconds / 2);
  std::vector<int> lost, behind;
  double longest = 0, longest_reading = 0;
  int64_t least = state.entered;
  for (size_t r = 0; r < state.pulses.size(); ++r) {
    const int64_t beat = state.pulses[r].beat.load();
    if (beat == 0 || static_cast<int>(r) == state.options->rank) continue;
    const double age = SecondsBetween(TimeOf(beat), now);
    if (age > silent) {
      lost.push_back(static_cast<int>(r));
      longest = std::max(longest, age);
    }
    const int64_t entered = state.pulses[r].entered.load();
    if (entered < least) behind.clear();
    least = std::min(least, entered);
    if (entered == least && entered < state.entered) behind.push_back(static_cast<int>(r));
  }
  if (!lost.empty()) {
    return fmt::format("{} {} not run for {:.0f} s: stopped or lost", JoinRanks(lost), lost.size() == 1 ? "has" : "have",
                       longest);
  }
  if (!behind.empty()) {
    for (const int r : behind) {
      const int64_t reading = state.pulses[static_cast<size_t>(r)].reading.load();
      if (reading != 0) longest_reading = std::max(longest_reading, SecondsBetween(TimeOf(reading), now));
    }
    return fmt::format("{} did not arrive: {} collective{} behind rank {}{}", JoinRanks(behind), state.entered - least,
                       state.entered - least == 1 ? "" : "s", state.options->rank,
                       longest_reading < 1 ? "" : fmt::format(", reading data for {:.0f} s", longest_reading));
  }
  return "";
}

void EnterLocked(const char* what, const std::string& group, State* state) {
  state->since = Clock::now();
  state->what = what;
  state->group = group;
  ++state->entered;
  if (Pulse* const pulse = state->own_pulse()) pulse->entered.store(state->entered);
}

}  // namespace

WaitNote::WaitNote() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.since = Clock::now();
  ++state.waits;
}

WaitNote::WaitNote(const char* what, const std::string& group) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  EnterLocked(what, group, &state);
  ++state.waits;
}

WaitNote::~WaitNote() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.since = Clock::now();
  --state.waits;
}

ReadingNote::ReadingNote() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  if (++state.reading > 1) return;
  state.reading_since = Clock::now();
  if (Pulse* const pulse = state.own_pulse()) pulse->reading.store(TicksOf(state.reading_since));
}

ReadingNote::~ReadingNote() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  if (--state.reading > 0) return;
  if (Pulse* const pulse = state.own_pulse()) pulse->reading.store(0);
  const Clock::time_point now = Clock::now();
  if (state.waits == 0) state.since = std::min(now, state.since + (now - state.reading_since));
}

void NoteEnqueued(const char* what, const std::string& group) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  EnterLocked(what, group, &state);
  state.enqueued = true;
}

void NoteIdle() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.since = Clock::now();
  state.enqueued = false;
}

void NoteProgress() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  state.since = Clock::now();
}

void NoteFault(v1::Reason reason, const std::string& detail) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  if (!state.fault) state.fault = Fault{reason, detail};
}

std::string LateRanks() {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  return LateRanksLocked(state);
}

class Watchdog::Impl {
 public:
  explicit Impl(WatchdogOptions options)
      : options_(std::move(options)),
        file_(options_.pulse_path, options_.size),
        interval_(std::clamp(options_.timeout_seconds / 20, 0.01, 1.0)) {
    State& state = TheState();
    {
      const std::lock_guard lock(state.mutex);
      state.fault.reset();
      state.enqueued = false;
      state.entered = 0;
      state.options = &options_;
      state.pulses = file_.pulses();
    }
    Beat();
    thread_ = std::thread([this] { Run(); });
  }
  ~Impl() {
    State& state = TheState();
    {
      const std::lock_guard lock(state.mutex);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
    const std::lock_guard lock(state.mutex);
    state.options = nullptr;
    state.pulses = {};
  }

 private:
  void Beat() {
    if (file_.pulses().empty()) return;
    file_.pulses()[static_cast<size_t>(options_.rank)].beat.store(TicksOf(Clock::now()));
  }

  void Run() {
    State& state = TheState();
    std::unique_lock lock(state.mutex);
    while (!stop_) {
      wake_.wait_for(lock, std::chrono::duration<double>(interval_));
      if (stop_) return;
      Beat();
      if (!Look(state)) continue;
      const Fault fault = state.fault ? *state.fault : *stall_;
      lock.unlock();
      options_.end(fault.reason, fmt::format("{}; its training thread did not end within {:.0f} s after that", fault.detail,
                                             options_.grace_seconds));
      return;
    }
  }

  // True when the process must end.
  bool Look(const State& state) {
    const Clock::time_point now = Clock::now();
    // It went on after all: a peer came late.
    if (stall_ && !state.fault && (!state.under_way() || state.since != stalled_since_)) {
      stall_.reset();
      end_at_.reset();
    }
    if (!end_at_ && state.fault) end_at_ = now + Grace();
    if (!end_at_ && state.under_way() && SecondsBetween(state.since, now) > options_.timeout_seconds) {
      stalled_since_ = state.since;
      const std::string late = LateRanksLocked(state);
      stall_ = Fault{v1::REASON_COLLECTIVE_TIMEOUT,
                     fmt::format("{} in group {} has not finished within {} s: {}", state.what, state.group,
                                 options_.timeout_seconds, late.empty() ? "a peer died or stalls" : late)};
      end_at_ = now + Grace();
    }
    return end_at_ && now >= *end_at_;
  }

  Clock::duration Grace() const {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.grace_seconds));
  }

  const WatchdogOptions options_;
  const PulseFile file_;
  const double interval_;
  std::condition_variable wake_;
  bool stop_ = false;           // Guarded by the mutex of the state.
  std::optional<Fault> stall_;  // This and the next two are the thread's own.
  Clock::time_point stalled_since_;
  std::optional<Clock::time_point> end_at_;
  std::thread thread_;
};

Watchdog::Watchdog(WatchdogOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Watchdog::~Watchdog() = default;

}  // namespace mbridge
