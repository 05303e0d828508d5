#include "engine/ops/moe_permute.h"

#include <algorithm>
#include <vector>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

void SortCpu(const Context&, const Tensor& experts, const ExpertRows& rows) {
  const int64_t count = experts.size(), kinds = rows.offsets.size() - 1;
  if (rows.slots.size() != count || rows.places.size() != count) {
    ThrowEngineError("{} chosen experts for {} rows", count, rows.slots.size());
  }
  const int32_t* chosen = experts.as<int32_t>();
  int32_t* offsets = rows.offsets.as<int32_t>();
  std::fill_n(offsets, kinds + 1, 0);
  for (int64_t slot = 0; slot < count; ++slot) ++offsets[chosen[slot] + 1];
  for (int64_t e = 0; e < kinds; ++e) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + kinds);
  for (int64_t slot = 0; slot < count; ++slot) {
    const int32_t row = next[chosen[slot]]++;
    rows.slots.as<int32_t>()[row] = static_cast<int32_t>(slot);
    rows.places.as<int32_t>()[slot] = row;
  }
}

void LoadCpu(const Context&, const ExpertRows& rows, const Tensor& load) {
  const int32_t* offsets = rows.offsets.as<int32_t>();
  for (int64_t e = 0; e < load.size(); ++e) load.as<float>()[e] += static_cast<float>(offsets[e + 1] - offsets[e]);
}

int64_t WidthOf(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

void GatherCpu(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& y) {
  const int64_t width = WidthOf(x), tokens = x.size() / width, count = rows.slots.size(), k = count / tokens;
  if (y.size() != count * width || y.dtype != x.dtype)
    ThrowEngineError("rows of {} into {}", x.shape.ToString(), y.shape.ToString());
  const int64_t bytes = width * static_cast<int64_t>(SizeOf(x.dtype));
  const int32_t* slots = rows.slots.as<int32_t>();
  const char* from = static_cast<const char*>(x.data);
  char* to = static_cast<char*>(y.data);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < count; ++row) std::copy_n(from + slots[row] / k * bytes, bytes, to + row * bytes);
}

void SumCpu(const Context&, const Tensor& x, const ExpertRows& rows, const Tensor& added, DType precision, const Tensor& y) {
  const int64_t width = WidthOf(y), tokens = y.size() / width, k = rows.places.size() / tokens;
  const int32_t* places = rows.places.as<int32_t>();
  cpu::WithPrecision(x.dtype, precision, [&]<class P>(P) {
    using Storage = typename P::Storage;
    const Storage *from = x.as<Storage>(), *more = added.empty() ? nullptr : added.as<Storage>();
    Storage* out = y.as<Storage>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < width; ++j) {
        float sum = 0.0f;
        for (int64_t i = 0; i < k; ++i) sum += P::Load(from[places[t * k + i] * width + j]);
        out[t * width + j] = P::Store(more == nullptr ? sum : P::Round(sum) + P::Load(more[t * width + j]));
      }
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const ExpertRows&)> SortByExpert{&SortCpu};
Op<void(const Context&, const ExpertRows&, const Tensor&)> AddExpertLoad{&LoadCpu};
Op<void(const Context&, const Tensor&, const ExpertRows&, const Tensor&)> GatherRows{&GatherCpu};
Op<void(const Context&, const Tensor&, const ExpertRows&, const Tensor&, DType, const Tensor&)> SumRows{&SumCpu};

}  // namespace mbridge
