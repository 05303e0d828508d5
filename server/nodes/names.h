// Names that the server makes, and the rules for those that users give.
#pragma once

#include <chrono>
#include <string>

namespace mbridge::server {

// "j-" and 12 base-32 characters: 40 bits of milliseconds, 20 random ones. Sorts by creation.
std::string NewJobId(std::chrono::system_clock::time_point now);
// "calm-otter-k3x9": readable, and fresh by its random end.
std::string NewRunName();
// 8 random base-32 characters behind `prefix`, for task and instance ids.
std::string NewId(const std::string& prefix);

// "" where `name` can be a run name (it becomes part of paths and checkpoint ids), else what is wrong with it.
std::string WhyNotARunName(const std::string& name);

}  // namespace mbridge::server
