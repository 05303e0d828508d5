#include "client/lib/exit_code.h"

#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/job_service.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

int OfEnd(v1::JobState state, v1::Reason reason, int suggested) {
  switch (state) {
    case v1::JOB_STATE_SUCCEEDED: return kExitOk;
    case v1::JOB_STATE_FAILED:
    case v1::JOB_STATE_CANCELLED: {
      if (suggested != 0) return suggested;
      if (const int code = InfoOf(reason).exit_code(); code != 0) return code;
      return state == v1::JOB_STATE_FAILED ? kExitJobFailed : kExitCancelled;
    }
    default: return kExitConnectionLost;
  }
}

}  // namespace

const std::vector<ExitCodeHelp>& ExitCodes() {
  static const std::vector<ExitCodeHelp> kCodes = {
      {kExitOk, "Done; with --wait or --follow: the job succeeded."},
      {kExitJobFailed, "The job or a rank of a bench failed, or compare found a difference."},
      {kExitInvalid, "Wrong usage or an invalid request; nothing was started."},
      {kExitNotFound, "No such job, checkpoint, recipe or node."},
      {kExitPermission, "Not authenticated, or not permitted."},
      {kExitCancelled, "The job was cancelled or killed."},
      {kExitTimedOut, "--timeout passed (the job goes on), or the job reached its wall-time limit."},
      {kExitConnectionLost, "No connection to the coordinator; the state of the job is unknown."},
      {kExitRefused, "Refused as things stand: quota, state, or resources."},
      {kExitDataLoss, "A checksum did not match."},
      {kExitInterrupted, "Interrupted by Ctrl-C; a job goes on, a bench is ended."},
  };
  return kCodes;
}

int ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitOk;
  // A refused call is not a failed job, also where its reason can end one (damaged data, found at submit or while training).
  if (const int code = InfoOf(ReasonOf(status)).exit_code(); code != 0 && code != kExitJobFailed) return code;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented: return kExitInvalid;
    case absl::StatusCode::kNotFound: return kExitNotFound;
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied: return kExitPermission;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:  // Of one call: whether it took effect is unknown.
    case absl::StatusCode::kCancelled: return kExitConnectionLost;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted: return kExitRefused;
    case absl::StatusCode::kDataLoss: return kExitDataLoss;
    default: return kExitJobFailed;
  }
}

int ExitCodeOf(const v1::StreamEnd& end) { return OfEnd(end.state(), end.reason(), end.exit_code()); }

int ExitCodeOf(const v1::Job& job) { return OfEnd(job.state(), job.reason(), 0); }

}  // namespace mbridge::client
