#include "engine/ops/embedding_places.h"

namespace mbridge {
namespace {

void LocalPlacesCpu(const Context&, const Tensor& tokens, int64_t first, int64_t count, const Tensor& out) {
  const int32_t* const in = tokens.as<int32_t>();
  int32_t* const places = out.as<int32_t>();
  for (int64_t i = 0; i < tokens.size(); ++i) {
    const int64_t place = in[i] - first;
    places[i] = place >= 0 && place < count ? static_cast<int32_t>(place) : -1;
  }
}

void StreamPlacesCpu(const Context&, const Tensor& position_ids, int64_t first_row, const Tensor& rows, const Tensor& positions) {
  const int64_t b = rows.shape[0], n = rows.shape[1], s = position_ids.shape[1];
  for (int64_t i = 0; i < b; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      rows.as<int32_t>()[i * n + j] = static_cast<int32_t>(j * b + i);
      positions.as<int32_t>()[i * n + j] = position_ids.as<int32_t>()[i * s + first_row + j];
    }
  }
}

}  // namespace

Op<void(const Context&, const Tensor&, int64_t, int64_t, const Tensor&)> LocalPlaces{&LocalPlacesCpu};
Op<void(const Context&, const Tensor&, int64_t, const Tensor&, const Tensor&)> StreamPlaces{&StreamPlacesCpu};

}  // namespace mbridge
