// The border between status-returning functions (data, checkpoints) and the training loop, which throws.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/core/error.h"
#include "proto/rpc/status_details.h"

namespace mbridge {

inline void ThrowIfError(const absl::Status& status) {
  if (status.ok()) return;
  const v1::Reason reason = ReasonOf(status);
  throw EngineError(reason == v1::REASON_UNSPECIFIED ? v1::REASON_ENGINE_ERROR : reason, std::string(status.message()));
}

template <class T> T ValueOrThrow(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return std::move(value).value();
}

}  // namespace mbridge
