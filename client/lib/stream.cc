#include "client/lib/stream.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/rpc/status_details.h"

namespace mbridge::client {
bool SleepUnlessStopped(std::chrono::milliseconds wait, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  return !wake.wait_for(lock, stop, wait, [&stop] { return stop.stop_requested(); });
}

bool MayReconnect(const absl::Status& status) {
  const v1::Reason reason = ReasonOf(status);
  if (reason != v1::REASON_UNSPECIFIED) return reason == v1::REASON_SERVICE_STOPPING;
  switch (status.code()) {
    case absl::StatusCode::kOk:  // Stopped short of its end message.
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:  // By the server or a proxy.
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:  // RST_STREAM.
    case absl::StatusCode::kDeadlineExceeded: return true;
    default: return false;
  }
}

absl::Status ReadUntilComplete(const ConnectionOptions& options, const std::stop_token& stop, bool ok_is_complete,
                               const std::function<StreamAttempt()>& once) {
  Backoff backoff;
  auto last_sign_of_life = Clock::now();
  for (bool told = false;;) {
    const StreamAttempt attempt = once();
    if (attempt.complete || (ok_is_complete && attempt.status.ok())) return absl::OkStatus();
    if (stop.stop_requested()) return absl::CancelledError("stopped by the caller");
    if (!MayReconnect(attempt.status)) return attempt.status;
    // A server that ends the call with OK again and again, without anything new, is not a sign of life.
    if (attempt.news || (attempt.alive && !attempt.status.ok())) {
      last_sign_of_life = std::max(last_sign_of_life, attempt.last_message);
      backoff.Reset();
      told = false;
    }
    const std::string cause =
        attempt.status.ok() ? "the stream ended without its end message" : std::string(attempt.status.message());
    const auto wait = backoff.Next();
    if (Clock::now() + wait > last_sign_of_life + options.lost_after) {
      return absl::UnavailableError(fmt::format("connection lost, job state unknown: nothing from {} for {:.0f} s ({})",
                                                options.server,
                                                std::chrono::duration<double>(Clock::now() - last_sign_of_life).count(), cause));
    }
    if (!told && options.on_retry) {
      options.on_retry(fmt::format("connection to {} lost ({}), trying again", options.server, cause));
      told = true;
    }
    if (!SleepUnlessStopped(wait, stop)) return absl::CancelledError("stopped by the caller");
  }
}

}  // namespace mbridge::client
