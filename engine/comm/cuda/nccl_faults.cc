#include "engine/comm/cuda/nccl_faults.h"

#include <cerrno>
#include <cstring>
#include <initializer_list>

namespace mbridge::cuda {
namespace {

bool Says(const std::string& detail, std::initializer_list<const char*> texts) {
  for (const char* text : texts) {
    if (detail.find(text) != std::string::npos) return true;
  }
  return false;
}

// With NCCL's own words and those of CUDA and of the C library that it repeats.
bool SaysOutOfMemory(const std::string& detail) {
  return Says(detail, {"out of memory", "Failed to CUDA", "Failed to malloc", "Allocation failed", std::strerror(ENOMEM)});
}

bool SaysConnection(const std::string& detail) {
  for (const int code :
       {ECONNRESET, ECONNREFUSED, ECONNABORTED, EPIPE, ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN, ENETRESET}) {
    if (Says(detail, {std::strerror(code)})) return true;
  }
  return Says(detail, {"closed by remote peer"});
}

}  // namespace

v1::Reason ReasonOfNccl(ncclResult_t result, const std::string& detail) {
  switch (result) {
    case ncclRemoteError: return v1::REASON_PEER_LOST;
    case ncclUnhandledCudaError: return SaysOutOfMemory(detail) ? v1::REASON_OUT_OF_MEMORY : v1::REASON_ENGINE_ERROR;
    case ncclSystemError:
      if (SaysConnection(detail)) return v1::REASON_PEER_LOST;
      return SaysOutOfMemory(detail) ? v1::REASON_OUT_OF_MEMORY : v1::REASON_ENGINE_ERROR;
    default: return v1::REASON_ENGINE_ERROR;
  }
}

std::string NextStepOfNccl(ncclResult_t result, const std::string& detail) {
  if (result == ncclInvalidUsage && Says(detail, {"Duplicate GPU"}))
    return "; each rank needs a GPU of its own: start rank N of a machine with CUDA_VISIBLE_DEVICES=N";
  if (result != ncclSystemError) return "";
  if (Says(detail, {"/dev/shm", "shared memory", std::strerror(ENOSPC)}))
    return "; ranks of one machine share memory through /dev/shm: make it larger (of a container: --shm-size)";
  if (Says(detail, {std::strerror(EMFILE), std::strerror(ENFILE)})) return "; raise the limit of open files (ulimit -n)";
  return SaysConnection(detail) ? "" : "; this machine refused a system call: NCCL_DEBUG=INFO writes more to the rank's log";
}

}  // namespace mbridge::cuda
