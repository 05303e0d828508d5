// Collectives between the ranks of one group. Implementations: self (one rank), Gloo (CPU), NCCL (CUDA).
//
// Every rank calls the same operations in the same order, in place or into caller's memory. All ranks get the same bits of a sum,
// in every run of the same ranks. Gloo: blocking, in rank order, BF16 widened to fp32 and rounded once. NCCL: nccl.h. A lost or
// late peer throws EngineError PEER_LOST or COLLECTIVE_TIMEOUT. One communicator belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/op.h"

namespace mbridge {

enum class ReduceOp : uint8_t { kSum, kMax };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // F32, BF16, F64 or I64; in place.
  virtual void AllReduce(const Tensor& tensor, ReduceOp op) = 0;
  // `input` has size() equal parts; rank r gets the sum of every rank's part r. F32 or BF16.
  virtual void ReduceScatter(const Tensor& input, const Tensor& output) = 0;
  // `output` holds size() parts in rank order. Any dtype.
  virtual void AllGather(const Tensor& input, const Tensor& output) = 0;
  virtual void Broadcast(const Tensor& tensor, int root) = 0;
  virtual void Barrier() = 0;

  // A communicator between some of this group's ranks, `ranks` in ascending order. Every rank calls it with the part that it is
  // in; `name` tells the parts of one splitting from those of another.
  virtual std::unique_ptr<Communicator> Split(const std::vector<int>& ranks, const std::string& name) = 0;

  // A communicator between the same ranks for what goes on beside this one: it belongs to another thread, or to the stream of
  // `context`. Every rank calls it.
  virtual std::unique_ptr<Communicator> Twin(const Context& context);
};

// A group of one: every operation is the identity.
std::unique_ptr<Communicator> MakeSelfCommunicator();

// Where ranks of a group find each other. `directory` is shared by the ranks of a node (an agent relays its files between
// nodes); a key is a file, written once by rename. `group` keeps the keys of different groups apart.
struct GlooOptions {
  std::string directory;
  std::string group;
  int rank = 0;
  int size = 1;
  double timeout_seconds = 600;  // dist.distributed_timeout_minutes.
};

// Connects to the peers over TCP on the loopback address, or on `MB_COMM_ADDRESS` where set. Throws COLLECTIVE_TIMEOUT.
// The process ignores SIGPIPE from then on: a dead peer is an exception, not a signal.
std::unique_ptr<Communicator> MakeGlooCommunicator(const GlooOptions& options);

}  // namespace mbridge
