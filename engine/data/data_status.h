// The three kinds of data errors, each with its reason.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

#include "proto/rpc/status_details.h"

namespace mbridge {

// A setting that cannot work; `field` is the Bridge key ("dataset.split").
inline absl::Status InvalidDataSetting(std::string field, std::string description) {
  return InvalidFields(v1::REASON_INVALID_CONFIG, {{std::move(field), std::move(description)}});
}
inline absl::Status DataNotFound(std::string_view message) {
  return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_DATA_NOT_FOUND, message);
}
// A file that is truncated, damaged or of another format.
inline absl::Status DamagedData(std::string_view message) {
  return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_DATA_ERROR, message);
}
// Input text or an operating system call that failed.
inline absl::Status DataError(absl::StatusCode code, std::string_view message) {
  return MakeStatus(code, v1::REASON_DATA_ERROR, message);
}

}  // namespace mbridge
