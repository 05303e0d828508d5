// The engine's one exception: thrown inside a step, caught at the rank's main, turned into a reason code there.
#pragma once

#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "mbridge/v1/reason.pb.h"

namespace mbridge {

class EngineError : public std::runtime_error {
 public:
  EngineError(v1::Reason reason, const std::string& message) : std::runtime_error(message), reason_(reason) {}
  v1::Reason reason() const { return reason_; }

 private:
  v1::Reason reason_;
};

// Throws REASON_ENGINE_ERROR with a formatted message. For broken invariants, not for user input.
template <class... Args> [[noreturn]] void ThrowEngineError(fmt::format_string<Args...> format, Args&&... args) {
  throw EngineError(v1::REASON_ENGINE_ERROR, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace mbridge
