#include "proto/rpc/status_details.h"

#include <gtest/gtest.h>

namespace mbridge {
namespace {

TEST(StatusDetails, ReasonAndFieldsSurviveTheWire) {
  const absl::Status status = InvalidFields(v1::REASON_UNKNOWN_KEY, {{"model.num_layer", "did you mean model.num_layers?"}});
  const absl::Status back = FromRpcStatus(ToRpcStatus(status));
  EXPECT_EQ(back.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(back.message(), "model.num_layer: did you mean model.num_layers?");
  EXPECT_EQ(ReasonOf(back), v1::REASON_UNKNOWN_KEY);
  ASSERT_EQ(FieldViolationsOf(back).size(), 1u);
  EXPECT_EQ(FieldViolationsOf(back)[0].field, "model.num_layer");
}

// A field that is no UTF-8 would cost the receiver every detail.
TEST(StatusDetails, OtherBytesBecomeQuestionMarks) {
  const absl::Status status =
      InvalidFields(v1::REASON_UNKNOWN_KEY, {{"model.\xff\xc3\xbc", "\xe2\x82\xac \xed\xa0\x80 \xf0\x9f\x98\x80 \xe2\x82"}});
  const auto fields = FieldViolationsOf(FromRpcStatus(ToRpcStatus(status)));
  ASSERT_EQ(fields.size(), 1u);
  EXPECT_EQ(fields[0].field, "model.?\xc3\xbc");
  EXPECT_EQ(fields[0].description, "\xe2\x82\xac ??? \xf0\x9f\x98\x80 ??");
}

TEST(StatusDetails, ForeignStatusHasNoReason) {
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(ReasonOf(absl::OkStatus()), v1::REASON_UNSPECIFIED);
}

TEST(StatusDetails, EveryReasonHasHelp) {
  const auto* list = v1::Reason_descriptor();
  for (int i = 0; i < list->value_count(); ++i) {
    if (list->value(i)->number() == 0) continue;
    EXPECT_FALSE(InfoOf(static_cast<v1::Reason>(list->value(i)->number())).help().empty()) << list->value(i)->name();
  }
}

}  // namespace
}  // namespace mbridge
