#include "proto/rpc/status_details.h"

#include <fmt/format.h>

#include <algorithm>

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

// Length of the UTF-8 sequence at the front of `text`; 0 where there is none.
size_t SequenceLength(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = byte(0) < 0x80   ? 1
                        : byte(0) < 0xc2 ? 0
                        : byte(0) < 0xe0 ? 2
                        : byte(0) < 0xf0 ? 3
                        : byte(0) < 0xf5 ? 4
                                         : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xf0 && byte(1) < 0x90);
  const bool beyond = (byte(0) == 0xed && byte(1) > 0x9f) || (byte(0) == 0xf4 && byte(1) > 0x8f);
  return length > 1 && (overlong || beyond) ? 0 : length;
}

// A protobuf string with other bytes is not parsed by the receiver, and all details would be lost.
std::string ToUtf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    valid += length == 0 ? std::string_view("?") : text.substr(0, length);
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return valid;
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
    message += fmt::format("{}: {}", ToUtf8(violation.field), ToUtf8(violation.description));
    auto* entry = bad_request.add_field_violations();
    entry->set_field(ToUtf8(violation.field));
    entry->set_description(ToUtf8(violation.description));
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
