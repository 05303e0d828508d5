#include "engine/ops/embedding_places.h"

#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {
namespace {

TEST(EmbeddingPlacesCudaSmall, EqualTheCpuTwins) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const int64_t b = 3, s = 10, n = 5;
  Owned ids(DType::kI32, {b, s});
  for (int64_t i = 0; i < b * s; ++i) ids.Set(i, static_cast<double>((i * 7) % 23));
  const Owned places(DType::kI32, {b, s}), rows(DType::kI32, {b, n}), positions(DType::kI32, {b, n});
  LocalPlaces.cpu({}, ids, 5, 9, places);
  StreamPlaces.cpu({}, ids, 5, rows, positions);
  const OnGpu device_ids(ids), device_places(DType::kI32, {b, s}), device_rows(DType::kI32, {b, n}),
      device_positions(DType::kI32, {b, n});
  LocalPlaces(gpu, device_ids, 5, 9, device_places);
  StreamPlaces(gpu, device_ids, 5, device_rows, device_positions);
  EXPECT_EQ(device_places.ToValues(), places.ToValues());
  EXPECT_EQ(device_rows.ToValues(), rows.ToValues());
  EXPECT_EQ(device_positions.ToValues(), positions.ToValues());
}

}  // namespace
}  // namespace mbridge::test
