#include "engine/ops/reference/mirror.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "engine/core/device.h"

namespace mbridge::test {
namespace {

constexpr size_t kGap = 256;
constexpr std::byte kPattern{0xff};

size_t RoundedUp(size_t offset) { return (offset + kGap - 1) / kGap * kGap; }

}  // namespace

Mirror::Mirror(const Context& context, const std::vector<Operands::Place>& places) : context_(context) {
  const std::vector<size_t> region_of = Join(places);
  size_t end = 0;
  for (Region& region : regions_) {
    region.offset = RoundedUp(end) + kGap + reinterpret_cast<uintptr_t>(region.host) % 16;
    end = region.offset + region.bytes;
  }
  image_.assign(RoundedUp(end) + kGap, kPattern);
  for (const Region& region : regions_) std::memcpy(&image_[region.offset], region.host, region.bytes);
  Device& device = DeviceOf(context.device);
  memory_ = static_cast<std::byte*>(device.Allocate(image_.size(), "mirrored operands"));
  device.CopyToDevice(context, memory_, image_.data(), image_.size());
  device.Synchronize(context);
  for (size_t i = 0; i < places.size(); ++i) {
    const Region& region = regions_[region_of[i]];
    places[i].move(memory_ + region.offset + (places[i].data - region.host), context.device);
  }
}

Mirror::~Mirror() { DeviceOf(context_.device).Free(memory_); }

std::vector<size_t> Mirror::Join(const std::vector<Operands::Place>& places) {
  std::vector<size_t> by_address(places.size()), region_of(places.size());
  std::iota(by_address.begin(), by_address.end(), 0);
  std::sort(by_address.begin(), by_address.end(), [&](size_t a, size_t b) { return places[a].data < places[b].data; });
  std::vector<Region> joined;
  for (const size_t i : by_address) {
    const Operands::Place& place = places[i];
    if (joined.empty() || place.data > joined.back().host + joined.back().bytes) joined.push_back({place.data, 0, 0, i});
    Region& region = joined.back();
    region.bytes = std::max(region.bytes, static_cast<size_t>(place.data + place.bytes - region.host));
    region.first = std::min(region.first, i);
    region_of[i] = joined.size() - 1;
  }
  std::vector<size_t> by_argument(joined.size()), rank(joined.size());
  std::iota(by_argument.begin(), by_argument.end(), 0);
  std::sort(by_argument.begin(), by_argument.end(), [&](size_t a, size_t b) { return joined[a].first < joined[b].first; });
  for (size_t i = 0; i < by_argument.size(); ++i) {
    rank[by_argument[i]] = i;
    regions_.push_back(joined[by_argument[i]]);
  }
  for (size_t& region : region_of) region = rank[region];
  return region_of;
}

void Mirror::CopyBack() {
  Device& device = DeviceOf(context_.device);
  device.CopyToHost(context_, image_.data(), memory_, image_.size());
  device.Synchronize(context_);
  size_t end = 0;
  const auto check_gap = [&](size_t next) {
    const auto changed = std::find_if(&image_[end], image_.data() + next, [](std::byte b) { return b != kPattern; });
    if (changed != image_.data() + next) {
      ADD_FAILURE() << "an operator wrote outside of its operands, " << changed - &image_[end] << " bytes behind one";
    }
  };
  for (const Region& region : regions_) {
    check_gap(region.offset);
    std::memcpy(region.host, &image_[region.offset], region.bytes);
    end = region.offset + region.bytes;
  }
  check_gap(image_.size());
}

}  // namespace mbridge::test
