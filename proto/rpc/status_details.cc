#include "proto/rpc/status_details.h"

#include <fmt/format.h>

#include "absl/strings/cord.h"
#include "google/protobuf/any.pb.h"
#include "google/rpc/error_details.pb.h"

namespace mbridge {
namespace {

constexpr std::string_view kDomain = "mbridge";
constexpr std::string_view kTypePrefix = "type.googleapis.com/";
constexpr std::string_view kReasonPrefix = "REASON_";

// absl 20220623 has its own string_view.
absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

template <class Message> std::string TypeUrl() { return fmt::format("{}{}", kTypePrefix, Message::descriptor()->full_name()); }

template <class Message> void Attach(absl::Status* status, const Message& message) {
  status->SetPayload(TypeUrl<Message>(), absl::Cord(message.SerializeAsString()));
}

template <class Message> bool Extract(const absl::Status& status, Message* message) {
  const auto payload = status.GetPayload(TypeUrl<Message>());
  return payload.has_value() && message->ParseFromString(std::string(*payload));
}

}  // namespace

absl::Status MakeStatus(absl::StatusCode code, v1::Reason reason, std::string_view message) {
  absl::Status status(code, ToAbsl(message));
  google::rpc::ErrorInfo info;
  info.set_reason(ReasonName(reason));
  info.set_domain(std::string(kDomain));
  Attach(&status, info);
  return status;
}

absl::Status InvalidFields(v1::Reason reason, const std::vector<FieldViolation>& violations) {
  std::string message;
  google::rpc::BadRequest bad_request;
  for (const FieldViolation& violation : violations) {
    if (!message.empty()) message += '\n';
    message += fmt::format("{}: {}", violation.field, violation.description);
    auto* entry = bad_request.add_field_violations();
    entry->set_field(violation.field);
    entry->set_description(violation.description);
  }
  absl::Status status = MakeStatus(absl::StatusCode::kInvalidArgument, reason, message);
  Attach(&status, bad_request);
  return status;
}

v1::Reason ReasonOf(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  if (!Extract(status, &info) || info.domain() != kDomain) return reason;
  if (!v1::Reason_Parse(std::string(kReasonPrefix) + info.reason(), &reason)) return v1::REASON_UNSPECIFIED;
  return reason;
}

std::vector<FieldViolation> FieldViolationsOf(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  google::rpc::BadRequest bad_request;
  if (!Extract(status, &bad_request)) return violations;
  for (const auto& entry : bad_request.field_violations()) violations.push_back({entry.field(), entry.description()});
  return violations;
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(std::string(status.message()));
  status.ForEachPayload([&rpc](absl::string_view url, const absl::Cord& payload) {
    auto* detail = rpc.add_details();
    detail->set_type_url(std::string(url));
    detail->set_value(std::string(payload));
  });
  return rpc;
}

absl::Status FromRpcStatus(const google::rpc::Status& rpc) {
  absl::Status status(static_cast<absl::StatusCode>(rpc.code()), rpc.message());
  for (const auto& detail : rpc.details()) status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  return status;
}

std::string ReasonName(v1::Reason reason) {
  const std::string& name = v1::Reason_Name(reason);
  return name.starts_with(kReasonPrefix) ? name.substr(kReasonPrefix.size()) : name;
}

const v1::ReasonInfo& InfoOf(v1::Reason reason) {
  const auto* value = v1::Reason_descriptor()->FindValueByNumber(reason);
  static const v1::ReasonInfo kNone;
  return value == nullptr ? kNone : value->options().GetExtension(v1::reason_info);
}

}  // namespace mbridge
