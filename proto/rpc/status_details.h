// google.rpc details on absl::Status: the error form of every layer above the engine.
//
// A refused request is an absl::Status that carries ErrorInfo{reason, domain "mbridge"} and, for bad input, BadRequest
// field violations. server/api turns it into a grpc::Status, client/lib turns that back, nothing is lost on the way.
// Thread-safe: free functions on values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "mbridge/v1/reason.pb.h"

namespace mbridge {

struct FieldViolation {
  std::string field;        // Dotted key or request field.
  std::string description;  // Value, allowed range and next step.
};

// A status with ErrorInfo.reason = the name of `reason` without REASON_. `message` is shown to people as it is.
absl::Status MakeStatus(absl::StatusCode code, v1::Reason reason, std::string_view message);

// INVALID_ARGUMENT with one BadRequest violation per entry; the message joins them, one a line.
absl::Status InvalidFields(v1::Reason reason, const std::vector<FieldViolation>& violations);

// REASON_UNSPECIFIED when the status carries no reason of ours.
v1::Reason ReasonOf(const absl::Status& status);
std::vector<FieldViolation> FieldViolationsOf(const absl::Status& status);

// Wire form and back; the details survive both ways.
google::rpc::Status ToRpcStatus(const absl::Status& status);
absl::Status FromRpcStatus(const google::rpc::Status& status);

// "NAN_LOSS" for REASON_NAN_LOSS.
std::string ReasonName(v1::Reason reason);
// Options of the enum value; the retry rule, exit code and help text.
const v1::ReasonInfo& InfoOf(v1::Reason reason);

}  // namespace mbridge

// Returns early with the status of an expression that is not OK.
#define MB_RETURN_IF_ERROR(expr)                                               \
  do {                                                                         \
    if (absl::Status mb_status_ = (expr); !mb_status_.ok()) return mb_status_; \
  } while (false)

#define MB_CONCAT_INNER(a, b) a##b
#define MB_CONCAT(a, b) MB_CONCAT_INNER(a, b)
#define MB_ASSIGN_OR_RETURN_IMPL(var, lhs, expr)                                          \
  auto var = (expr);                             /* NOLINT(bugprone-macro-parentheses) */ \
  if (!var.ok()) return std::move(var).status(); /* NOLINT(bugprone-macro-parentheses) */ \
  lhs = std::move(var).value()                   /* NOLINT(bugprone-macro-parentheses): both may be declarations */
// MB_ASSIGN_OR_RETURN(auto x, F()): x = value of a StatusOr, or returns its status.
#define MB_ASSIGN_OR_RETURN(lhs, expr) MB_ASSIGN_OR_RETURN_IMPL(MB_CONCAT(mb_status_or_, __LINE__), lhs, expr)
