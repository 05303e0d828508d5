#include "mbridge/v1/job_service.grpc.pb.h"
#include "server/api/call.h"
#include "server/api/job_streams.h"
#include "server/api/paging.h"
#include "server/api/services.h"

namespace mbridge::server {
namespace {

class JobService : public v1::JobService::CallbackService {
 public:
  explicit JobService(const ServiceContext& context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context, const v1::CreateJobRequest* request,
                                      v1::CreateJobResponse* response) override {
    const PendingCall call(context, "JobService/CreateJob", context_.metrics);
    if (absl::Status size = CheckRequestSize(*request); !size.ok()) {
      call.Done(size);
      return call.reactor();
    }
    context_.submitter->Submit(*request, [call, response](absl::StatusOr<v1::CreateJobResponse> result) {
      if (!result.ok()) return call.Done(result.status());
      *response = *std::move(result);
      call.Done(absl::OkStatus());
    });
    return call.reactor();
  }

  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context, const v1::GetJobRequest* request,
                                   v1::GetJobResponse* response) override {
    return Answer(context, "JobService/GetJob", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(*response->mutable_job(), context_.controller->GetJob(request->job_id()));
      MB_ASSIGN_OR_RETURN(*response->mutable_job()->mutable_resolved(), context_.store->GetResolved(request->job_id()));
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context, const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override {
    return Answer(context, "JobService/ListJobs", context_.metrics, *request, [&] { return List(*request, response); });
  }

  absl::Status List(const v1::ListJobsRequest& request, v1::ListJobsResponse* response) const {
    // The token is bound to the filter: another filter means another list.
    const std::string list = "jobs?" + request.filter();
    MB_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    MB_ASSIGN_OR_RETURN(const auto matches, ParseJobFilter(request.filter()));
    MB_ASSIGN_OR_RETURN(const std::string before, ParsePageToken(list, request.page_token()));
    return context_.store->VisitJobs(before, [&](const v1::Job& stored) {
      v1::Job job = stored;
      context_.controller->Overlay(&job);
      if (!matches(job)) return true;
      if (response->jobs_size() == size) {
        response->set_next_page_token(MakePageToken(list, response->jobs(size - 1).job_id()));
        return false;
      }
      *response->add_jobs() = std::move(job);
      return true;
    });
  }

  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context, const v1::CancelJobRequest* request,
                                      v1::CancelJobResponse* response) override {
    return Answer(context, "JobService/CancelJob", context_.metrics, *request, [&]() -> absl::Status {
      const auto why = request->kill() ? v1::REASON_KILLED_BY_USER : v1::REASON_CANCELLED_BY_USER;
      MB_ASSIGN_OR_RETURN(*response->mutable_job(), context_.controller->StopJob(request->job_id(), request->kill(), why));
      return absl::OkStatus();
    });
  }

  grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(grpc::CallbackServerContext*,
                                                           const v1::WatchJobRequest* request) override {
    return server::WatchJob(context_, *request);
  }
  grpc::ServerWriteReactor<v1::TailLogsResponse>* TailLogs(grpc::CallbackServerContext*,
                                                           const v1::TailLogsRequest* request) override {
    return server::TailLogs(context_, *request);
  }
  grpc::ServerWriteReactor<v1::StreamMetricsResponse>* StreamMetrics(grpc::CallbackServerContext*,
                                                                     const v1::StreamMetricsRequest* request) override {
    return server::StreamMetrics(context_, *request);
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeJobService(const ServiceContext& context) { return std::make_unique<JobService>(context); }

}  // namespace mbridge::server
