// What a rank's memory holds, as text.
#pragma once

#include <cstdint>
#include <string>

#include "mbridge/v1/recipe.pb.h"

namespace mbridge {

// All parts together, without the checkpoint.
int64_t TotalBytes(const v1::MemoryEstimate& memory);

// "weights 2357 MiB, main gradients 4714 MiB, …; together 36190 MiB"; parts without bytes are left out.
std::string MemoryLine(const v1::MemoryEstimate& memory);

// The same, a line for each part, under `title`.
std::string MemoryTable(const std::string& title, const v1::MemoryEstimate& memory);

}  // namespace mbridge
