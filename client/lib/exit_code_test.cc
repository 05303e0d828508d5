#include "client/lib/exit_code.h"

#include <gtest/gtest.h>

#include <set>

#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/job_service.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

std::set<int> Known() {
  std::set<int> codes;
  for (const ExitCodeHelp& entry : ExitCodes()) codes.insert(entry.code);
  return codes;
}

TEST(ExitCode, EveryReasonOfTheSchemaHasAKnownCode) {
  const auto* reasons = v1::Reason_descriptor();
  for (int i = 0; i < reasons->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(reasons->value(i)->number());
    const int code = InfoOf(reason).exit_code();
    EXPECT_TRUE(Known().contains(code)) << ReasonName(reason) << " has exit code " << code;
    // A refusal with the reason exits with its code, and never with 0 or as a failed job.
    const absl::Status refusal = MakeStatus(absl::StatusCode::kFailedPrecondition, reason, "x");
    if (code > kExitJobFailed) {
      EXPECT_EQ(ExitCodeOf(refusal), code) << ReasonName(reason);
    }
    EXPECT_GT(ExitCodeOf(refusal), kExitJobFailed) << ReasonName(reason);
    // So does a job that ended for it.
    v1::StreamEnd end;
    end.set_state(v1::JOB_STATE_FAILED);
    end.set_reason(reason);
    EXPECT_EQ(ExitCodeOf(end), code == 0 ? kExitJobFailed : code) << ReasonName(reason);
  }
}

TEST(ExitCode, OnlySuccessIsZero) {
  v1::StreamEnd end;
  end.set_state(v1::JOB_STATE_SUCCEEDED);
  end.set_exit_code(3);
  EXPECT_EQ(ExitCodeOf(end), kExitOk);
  end.set_exit_code(0);
  end.set_state(v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(ExitCodeOf(end), kExitCancelled);
  end.set_state(v1::JOB_STATE_RUNNING);
  EXPECT_EQ(ExitCodeOf(end), kExitConnectionLost);
  EXPECT_EQ(ExitCodeOf(v1::StreamEnd()), kExitConnectionLost);
}

TEST(ExitCode, StatusCodesWithoutReason) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("")), 2);
  EXPECT_EQ(ExitCodeOf(absl::UnimplementedError("")), 2);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), 3);
  EXPECT_EQ(ExitCodeOf(absl::UnauthenticatedError("")), 4);
  EXPECT_EQ(ExitCodeOf(absl::PermissionDeniedError("")), 4);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), 7);
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), 7);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), 8);
  EXPECT_EQ(ExitCodeOf(absl::DataLossError("")), 9);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("")), 1);
}

}  // namespace
}  // namespace mbridge::client
