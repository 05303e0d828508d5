#include "mbridge/v1/checkpoint_service.grpc.pb.h"

#include <fmt/format.h>

#include "server/api/call.h"
#include "server/api/paging.h"
#include "server/api/services.h"
#include "server/nodes/names.h"

namespace mbridge::server {
namespace {

// Reading a large checkpoint takes minutes; the client's own deadline is usually shorter.
constexpr std::chrono::minutes kVerifyTimeout{30};

class CheckpointService : public v1::CheckpointService::CallbackService {
 public:
  explicit CheckpointService(const ServiceContext& context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context, const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsResponse* response) override {
    return Answer(context, "CheckpointService/ListCheckpoints", context_.metrics, *request,
                  [&] { return List(*request, response); });
  }

  absl::Status List(const v1::ListCheckpointsRequest& request, v1::ListCheckpointsResponse* response) const {
    const std::string list = fmt::format("checkpoints?{}&{}&{}", request.run_name(), request.job_id(), request.include_deleted());
    MB_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    MB_ASSIGN_OR_RETURN(const std::string after, ParsePageToken(list, request.page_token()));
    MB_ASSIGN_OR_RETURN(const auto checkpoints, context_.store->ListCheckpoints(request.run_name()));
    bool begun = after.empty();
    for (const v1::Checkpoint& checkpoint : checkpoints) {
      if (!begun) {
        begun = checkpoint.checkpoint_id() == after;
        continue;
      }
      if (!request.job_id().empty() && checkpoint.job_id() != request.job_id()) continue;
      const bool gone = checkpoint.state() == v1::CHECKPOINT_STATE_DELETED || checkpoint.state() == v1::CHECKPOINT_STATE_DELETING;
      if (gone && !request.include_deleted()) continue;
      if (response->checkpoints_size() == size) {
        response->set_next_page_token(MakePageToken(list, response->checkpoints(size - 1).checkpoint_id()));
        break;
      }
      *response->add_checkpoints() = checkpoint;
    }
    return absl::OkStatus();
  }

  grpc::ServerUnaryReactor* GetCheckpoint(grpc::CallbackServerContext* context, const v1::GetCheckpointRequest* request,
                                          v1::GetCheckpointResponse* response) override {
    return Answer(context, "CheckpointService/GetCheckpoint", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(*response->mutable_checkpoint(), context_.store->GetCheckpoint(request->checkpoint_id()));
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* VerifyCheckpoint(grpc::CallbackServerContext* context, const v1::VerifyCheckpointRequest* request,
                                             v1::VerifyCheckpointResponse* response) override {
    const PendingCall call(context, "CheckpointService/VerifyCheckpoint", context_.metrics);
    const auto checkpoint = context_.store->GetCheckpoint(request->checkpoint_id());
    if (!checkpoint.ok()) {
      call.Done(checkpoint.status());
      return call.reactor();
    }
    v1::NodeTask task;
    task.set_task_id(NewId("verify-"));
    task.mutable_verify()->set_path(checkpoint->path());
    task.mutable_verify()->set_manifest_hash(checkpoint->manifest_hash());
    context_.controller->RunTask(
        checkpoint->node_id(), std::move(task), kVerifyTimeout,
        [this, call, response, id = checkpoint->checkpoint_id()](const absl::StatusOr<v1::TaskResult>& result) {
          call.Done(result.ok() ? TakeVerification(id, *result, response) : result.status());
        });
    return call.reactor();
  }

  absl::Status TakeVerification(const std::string& id, const v1::TaskResult& result,
                                v1::VerifyCheckpointResponse* response) const {
    MB_ASSIGN_OR_RETURN(*response->mutable_checkpoint(), context_.controller->RecordVerification(id, result));
    response->set_bytes_read(result.bytes());
    response->set_tensors(result.tensors());
    if (result.ok()) return absl::OkStatus();
    return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT,
                      fmt::format("checkpoint {} is corrupt: {}; `mbctl ckpt ls` shows earlier ones", id, result.detail()));
  }

  grpc::ServerUnaryReactor* DeleteCheckpoint(grpc::CallbackServerContext* context, const v1::DeleteCheckpointRequest* request,
                                             v1::DeleteCheckpointResponse* response) override {
    return Answer(context, "CheckpointService/DeleteCheckpoint", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(*response->mutable_checkpoint(),
                          context_.controller->DeleteCheckpoint(request->checkpoint_id(), request->force()));
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* PinCheckpoint(grpc::CallbackServerContext* context, const v1::PinCheckpointRequest* request,
                                          v1::PinCheckpointResponse* response) override {
    return Answer(context, "CheckpointService/PinCheckpoint", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(*response->mutable_checkpoint(),
                          context_.controller->PinCheckpoint(request->checkpoint_id(), request->pinned(), request->etag()));
      return absl::OkStatus();
    });
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCheckpointService(const ServiceContext& context) {
  return std::make_unique<CheckpointService>(context);
}

}  // namespace mbridge::server
