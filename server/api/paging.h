// Page sizes, opaque page tokens and the filter grammar of lists.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "mbridge/v1/job.pb.h"

namespace mbridge::server {

// 0 = 50, above 1000 = 1000, negative is INVALID_ARGUMENT INVALID_REQUEST.
absl::StatusOr<int> PageSize(int32_t requested);

// A token names the list that it belongs to and the last row seen; it stays valid across restarts.
std::string MakePageToken(const std::string& list, const std::string& last);
// "" for an empty token; INVALID_ARGUMENT where the token is not of this list.
absl::StatusOr<std::string> ParsePageToken(const std::string& list, const std::string& token);

std::string ToHex(const std::string& bytes);
// False where `hex` is not one.
bool FromHex(const std::string& hex, std::string* bytes);

// Terms joined by AND: state=RUNNING, owner=x, recipe=x, run_name=x, label.k=v, live=true.
absl::StatusOr<std::function<bool(const v1::Job&)>> ParseJobFilter(const std::string& filter);

}  // namespace mbridge::server
