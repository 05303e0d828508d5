#include "engine/checkpoint/agreement.h"

#include <algorithm>

#include <fmt/format.h>

#include "google/rpc/status.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

std::vector<std::string> GatherTexts(const std::string& mine, Communicator* world) {
  const int size = world->size();
  if (size == 1) return {mine};
  int64_t length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(static_cast<size_t>(size));
  world->AllGather({&length, DType::kI64, DeviceType::kCpu, {1}}, {lengths.data(), DType::kI64, DeviceType::kCpu, {size}});
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(static_cast<size_t>(size));
  if (longest == 0) return texts;
  std::string padded = mine;
  padded.resize(static_cast<size_t>(longest));
  std::string all(static_cast<size_t>(longest * size), '\0');
  world->AllGather({padded.data(), DType::kU8, DeviceType::kCpu, {longest}},
                   {all.data(), DType::kU8, DeviceType::kCpu, {longest * size}});
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank] = all.substr(rank * static_cast<size_t>(longest), static_cast<size_t>(lengths[rank]));
  }
  return texts;
}

absl::Status Agree(const absl::Status& mine, Communicator* world) {
  if (world->size() == 1) return mine;
  const std::vector<std::string> texts = GatherTexts(mine.ok() ? "" : ToRpcStatus(mine).SerializeAsString(), world);
  for (const std::string& text : texts) {
    google::rpc::Status status;
    if (!text.empty() && status.ParseFromString(text)) return FromRpcStatus(status);
  }
  return absl::OkStatus();
}

}  // namespace mbridge
