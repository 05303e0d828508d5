#include "engine/ops/embedding_places.h"

#include "engine/ops/cuda/launch.h"

namespace mbridge::cuda {
namespace {

__global__ void LocalPlacesKernel(const int32_t* tokens, int64_t size, int64_t first, int64_t count, int32_t* out) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t place = tokens[i] - first;
    out[i] = place >= 0 && place < count ? static_cast<int32_t>(place) : -1;
  }
}

__global__ void StreamPlacesKernel(const int32_t* position_ids, int64_t b, int64_t n, int64_t s, int64_t first_row, int32_t* rows,
                                   int32_t* positions) {
  for (int64_t k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; k < b * n; k += int64_t{gridDim.x} * blockDim.x) {
    const int64_t i = k / n, j = k % n;
    rows[k] = static_cast<int32_t>(j * b + i);
    positions[k] = position_ids[i * s + first_row + j];
  }
}

void LocalPlacesCuda(const Context& context, const Tensor& tokens, int64_t first, int64_t count, const Tensor& out) {
  LocalPlacesKernel<<<GridOf(tokens.size(), 256), 256, 0, StreamOf(context)>>>(tokens.as<int32_t>(), tokens.size(), first, count,
                                                                               out.as<int32_t>());
  MB_CUDA_LAUNCHED();
}

void StreamPlacesCuda(const Context& context, const Tensor& position_ids, int64_t first_row, const Tensor& rows,
                      const Tensor& positions) {
  StreamPlacesKernel<<<GridOf(rows.size(), 256), 256, 0, StreamOf(context)>>>(position_ids.as<int32_t>(), rows.shape[0],
                                                                              rows.shape[1], position_ids.shape[1], first_row,
                                                                              rows.as<int32_t>(), positions.as<int32_t>());
  MB_CUDA_LAUNCHED();
}

const bool g_registered = (LocalPlaces.cuda = &LocalPlacesCuda, StreamPlaces.cuda = &StreamPlacesCuda, true);

}  // namespace
}  // namespace mbridge::cuda
