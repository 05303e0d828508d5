// Collectives between GPUs through NCCL, behind the Communicator interface.
#pragma once

#include <memory>
#include <string>

#include "engine/comm/communicator.h"
#include "engine/core/op.h"

namespace mbridge {

struct NcclOptions {
  std::string directory;  // Rendezvous folder and group name, as GlooOptions.
  std::string group;
  int rank = 0;
  int size = 1;
  double timeout_seconds = 600;
  // Operations on CUDA tensors are enqueued on its stream and return at once; those on CPU tensors are staged through the GPU
  // and return when they are done.
  Context context;
};

// Connects to the peers. Wherever the host waits for the GPU, a peer that dies or stalls for longer than the timeout throws
// PEER_LOST or COLLECTIVE_TIMEOUT and aborts the group. Inside a call of NCCL (connecting, a first collective) nothing but the
// process's watchdog (engine/core/watchdog.h) ends the wait, with the process. Throws EngineError, also where the program was
// built without CUDA; OUT_OF_MEMORY where NCCL could not allocate. The destructor waits for the peers to let go of the group too,
// at most half a minute; while an exception unwinds it aborts the group at once. A CUDA graph with operations of the group must
// be gone before. Sums are taken in the tensor's type, in the order of NCCL's rings and trees, which depends on the topology, the
// size and NCCL's settings (never on rank order): a BF16 sum may be rounded at every rank that it passes. Tensor-parallel sums of
// activations and their gradients are such; gradients of parameters are fp32.
std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclOptions& options);

// Called once by the CUDA code when it is linked in.
using NcclFactory = std::unique_ptr<Communicator> (*)(const NcclOptions& options);
void RegisterNccl(NcclFactory factory);

}  // namespace mbridge
