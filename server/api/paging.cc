#include "server/api/paging.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <sstream>
#include <vector>

#include "proto/rpc/status_details.h"
#include "server/nodes/controller.h"

namespace mbridge::server {
namespace {

constexpr int kDefaultPage = 50, kLargestPage = 1000;
constexpr size_t kMaxFilter = 4096;
using Predicate = std::function<bool(const v1::Job&)>;

absl::Status Wrong(const std::string& field, const std::string& why) {
  return InvalidFields(v1::REASON_INVALID_REQUEST, {{field, why}});
}

absl::StatusOr<Predicate> ParseState(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) { return std::toupper(c); });
  v1::JobState state;
  if (!v1::JobState_Parse("JOB_STATE_" + value, &state) || state == v1::JOB_STATE_UNSPECIFIED) {
    return Wrong("filter",
                 fmt::format("state={} is not one of QUEUED, STARTING, RUNNING, STOPPING, SUCCEEDED, FAILED, CANCELLED", value));
  }
  return Predicate([state](const v1::Job& job) { return job.state() == state; });
}

absl::StatusOr<Predicate> ParseTerm(const std::string& term) {
  const size_t equals = term.find('=');
  if (equals == std::string::npos || equals == 0) return Wrong("filter", fmt::format("'{}' is not of the form key=value", term));
  const std::string key = term.substr(0, equals), value = term.substr(equals + 1);
  if (key == "state") return ParseState(value);
  if (key == "owner") return Predicate([value](const v1::Job& job) { return job.spec().owner() == value; });
  if (key == "recipe")
    return Predicate([value](const v1::Job& job) { return job.spec().recipe() == value || job.resolved().recipe() == value; });
  if (key == "run_name") return Predicate([value](const v1::Job& job) { return job.run_name() == value; });
  if (key == "live") {
    if (value != "true" && value != "false") return Wrong("filter", fmt::format("live={} is neither true nor false", value));
    return Predicate([wanted = value == "true"](const v1::Job& job) { return IsTerminal(job.state()) != wanted; });
  }
  if (key.starts_with("label.")) {
    return Predicate([label = key.substr(6), value](const v1::Job& job) {
      const auto found = job.spec().labels().find(label);
      return found != job.spec().labels().end() && found->second == value;
    });
  }
  return Wrong("filter", fmt::format("'{}' is not one of state, owner, recipe, run_name, live, label.KEY", key));
}

}  // namespace

absl::StatusOr<int> PageSize(int32_t requested) {
  if (requested < 0)
    return Wrong("page_size", fmt::format("{} is negative; 0 means {}, at most {}", requested, kDefaultPage, kLargestPage));
  return requested == 0 ? kDefaultPage : std::min(requested, kLargestPage);
}

std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (const char byte : bytes) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return hex;
}

bool FromHex(const std::string& hex, std::string* bytes) {
  bytes->clear();
  if (hex.size() % 2 != 0) return false;
  for (size_t i = 0; i < hex.size(); i += 2) {
    if (!std::isxdigit(static_cast<unsigned char>(hex[i])) || !std::isxdigit(static_cast<unsigned char>(hex[i + 1])))
      return false;
    bytes->push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return true;
}

std::string MakePageToken(const std::string& list, const std::string& last) { return ToHex(list + ":" + last); }

absl::StatusOr<std::string> ParsePageToken(const std::string& list, const std::string& token) {
  if (token.empty()) return std::string();
  std::string text;
  if (token.size() > 4096 || !FromHex(token, &text) || !text.starts_with(list + ":")) {
    return Wrong("page_token", "is not one that this list gave out; leave it empty to begin anew");
  }
  return text.substr(list.size() + 1);
}

absl::StatusOr<Predicate> ParseJobFilter(const std::string& filter) {
  if (filter.size() > kMaxFilter)
    return Wrong("filter", fmt::format("has {} characters, at most {} are allowed", filter.size(), kMaxFilter));
  auto predicates = std::make_shared<std::vector<Predicate>>();
  std::istringstream words(filter);
  bool joined = true;  // A term may follow.
  for (std::string word; words >> word;) {
    if (word == "AND") {
      if (joined) return Wrong("filter", "has an AND without a term before it");
      joined = true;
      continue;
    }
    if (word.ends_with(',')) word.pop_back();
    if (word.empty()) continue;
    MB_ASSIGN_OR_RETURN(Predicate predicate, ParseTerm(word));
    predicates->push_back(std::move(predicate));
    joined = false;
  }
  if (joined && !predicates->empty()) return Wrong("filter", "ends with AND");
  return Predicate([predicates](const v1::Job& job) {
    return std::all_of(predicates->begin(), predicates->end(), [&](const Predicate& predicate) { return predicate(job); });
  });
}

}  // namespace mbridge::server
