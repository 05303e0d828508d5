// Work beside a context's main stream: communication that goes on while the operators compute.
//
// On CUDA the work is enqueued by the calling thread, on a stream of its own, and events tie the two streams together; on the CPU
// one thread takes the work from a queue. Either way it is done in the order of the calls. One thread calls these methods.
#pragma once

#include <functional>
#include <memory>

#include "engine/core/op.h"

namespace mbridge {

class SideStream {
 public:
  virtual ~SideStream() = default;  // As Stop.

  // Where the work runs.
  virtual const Context& context() const = 0;
  // `work` runs after all that the main stream holds now and after all earlier work; caller and main stream go on at once.
  // `slot`: a place to wait for, below the number of slots; joined before it is used again. On the CPU throws what earlier work
  // has thrown.
  virtual void Start(int slot, std::function<void()> work) = 0;
  // What the main stream is given from now on runs after the work of the slot, and after all that was started before that. On the
  // CPU waits for it, and throws what work has thrown: after that nothing runs any more.
  virtual void Join(int slot) = 0;
  // Work that has not begun is dropped. On the CPU waits for what runs.
  virtual void Stop() = 0;
};

// Beside `main`, with `slots` places to wait for. Throws EngineError.
std::unique_ptr<SideStream> MakeSideStream(const Context& main, int slots);
// No other stream: work runs in the main one, inside Start.
std::unique_ptr<SideStream> MakeInlineStream(const Context& main);
// MakeSideStream on the CPU.
std::unique_ptr<SideStream> MakeThreadStream(const Context& main, int slots);

}  // namespace mbridge
