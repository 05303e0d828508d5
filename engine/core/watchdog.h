// Ends a rank that waits for its peers too long, wherever its training thread hangs: in a driver call, in a collective, or while
// it unwinds after a fault.
//
// Communicators and devices note what the training thread does; a thread of the watchdog looks at that. The notes are thread-safe
// and cost some ten nanoseconds, with or without a watchdog. At most one watchdog a process.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>

#include "engine/core/error.h"
#include "engine/core/failpoint.h"
#include "mbridge/v1/reason.pb.h"

namespace mbridge {

// While it lives a thread waits: in a collective that returns when it is done, or for a device. `what` is a literal.
class WaitNote {
 public:
  WaitNote();
  WaitNote(const char* what, const std::string& group);
  ~WaitNote();
  WaitNote(const WaitNote&) = delete;
  WaitNote& operator=(const WaitNote&) = delete;
};
// While it lives the training thread reads data: it waits for nobody, however long that takes. What is enqueued on a device,
// which the host cannot see to be done, is not watched meanwhile, and the time does not count; a WaitNote of another thread is.
class ReadingNote {
 public:
  ReadingNote();
  ~ReadingNote();
  ReadingNote(const ReadingNote&) = delete;
  ReadingNote& operator=(const ReadingNote&) = delete;
};
// A collective is enqueued on a device: work that needs other ranks is under way until NoteIdle.
void NoteEnqueued(const char* what, const std::string& group);
// The device has done all that was enqueued.
void NoteIdle();
// A part of what is waited for is done.
void NoteProgress();
// The rank fails for this reason and unwinds; the first call counts.
void NoteFault(v1::Reason reason, const std::string& detail);

// Returns f(). What it throws is noted before the unwinding, which may hang in the driver.
template <class F> auto NotingFaults(F&& f) {
  try {
    return f();
  } catch (const EngineError& error) {
    NoteFault(error.reason(), error.what());
    MB_FAILPOINT("rank.unwind");
    throw;
  } catch (const std::bad_alloc&) {
    NoteFault(v1::REASON_OUT_OF_MEMORY, "an allocation of host memory failed");
    throw;
  } catch (const std::exception& error) {
    NoteFault(v1::REASON_ENGINE_ERROR, error.what());
    throw;
  }
}

// Which ranks of this node keep the others waiting, as a clause: "rank 1 has not run for 60 s: it is stopped or lost". Empty
// where that is not known, which includes every process without a watchdog.
std::string LateRanks();

struct WatchdogOptions {
  double timeout_seconds = 600;  // Of work under way without any progress.
  double grace_seconds = 10;     // Then for the training thread to end by itself; also after a fault.
  int rank = 0;
  int size = 1;
  // A file of all ranks of this node, made by the first, in which each says that it lives and how far it is; empty: ranks know
  // nothing of each other.
  std::string pulse_path;
  // Ends the process, from the watchdog's thread; called once.
  std::function<void(v1::Reason reason, const std::string& detail)> end;
};

class Watchdog {
 public:
  explicit Watchdog(WatchdogOptions options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mbridge
