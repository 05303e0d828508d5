#include "engine/comm/nccl.h"

namespace mbridge {
namespace {

NcclFactory g_factory = nullptr;

}  // namespace

void RegisterNccl(NcclFactory factory) { g_factory = factory; }

std::unique_ptr<Communicator> MakeNcclCommunicator(const NcclOptions& options) {
  if (options.rank < 0 || options.rank >= options.size) ThrowEngineError("rank {} of {}", options.rank, options.size);
  if (options.size == 1) return MakeSelfCommunicator();
  if (g_factory == nullptr) ThrowEngineError("this program was built without CUDA");
  return g_factory(options);
}

}  // namespace mbridge
