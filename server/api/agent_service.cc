#include <algorithm>
#include <mutex>
#include <vector>

#include "mbridge/v1/admin_service.grpc.pb.h"
#include "mbridge/v1/agent_service.grpc.pb.h"
#include "server/api/call.h"
#include "server/api/services.h"

namespace mbridge::server {
namespace {

using Time = std::chrono::steady_clock::time_point;
// Well below the time after which a silent node counts as unreachable.
constexpr int32_t kLongestWaitMs = 5000;
constexpr int32_t kLongestGraceSeconds = 24 * 3600;

// A Sync without news is held until there are some.
class AgentService : public v1::AgentService::CallbackService, public AgentCalls {
 public:
  explicit AgentService(const ServiceContext& context) : context_(context) {}

  grpc::Service* service() override { return this; }

  void NodeChanged(const std::string& node_id) override {
    Release(
        [&](const Held& held) { return held.node_id == node_id && context_.controller->Orders(node_id).version() != held.seen; });
  }
  void Tick() override {
    const Time now = std::chrono::steady_clock::now();
    Release([now](const Held& held) { return now >= held.until; });
  }
  void Stop() override {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    Release([](const Held&) { return true; });
  }

 private:
  struct Held {
    PendingCall call;
    v1::SyncResponse* response;
    std::string node_id, seen;
    Time until;
  };

  grpc::ServerUnaryReactor* Sync(grpc::CallbackServerContext* context, const v1::SyncRequest* request,
                                 v1::SyncResponse* response) override {
    const PendingCall call(context, "AgentService/Sync", context_.metrics);
    auto answer = context_.controller->Sync(*request);
    if (!answer.ok()) {
      call.Done(answer.status());
      return call.reactor();
    }
    *response = std::move(answer->response);
    const int32_t wait_ms = std::min(request->wait_ms(), kLongestWaitMs);
    const std::string node_id = request->node_id();
    if (!answer->may_wait || wait_ms <= 0 ||
        !Hold({call, response, node_id, request->seen_version(),
               std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms)})) {
      call.Done(absl::OkStatus());
      return call.reactor();
    }
    NodeChanged(node_id);  // What happened between the answer and the hold.
    return call.reactor();
  }

  bool Hold(Held held) {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    held_.push_back(std::move(held));
    return true;
  }

  template <class Predicate> void Release(Predicate due) {
    std::vector<Held> released;
    {
      std::lock_guard lock(mutex_);
      const auto first = std::stable_partition(held_.begin(), held_.end(), [&](const Held& held) { return !due(held); });
      std::move(first, held_.end(), std::back_inserter(released));
      held_.erase(first, held_.end());
    }
    for (const Held& held : released) {
      *held.response = context_.controller->Orders(held.node_id);
      held.call.Done(absl::OkStatus());
    }
  }

  const ServiceContext context_;
  std::mutex mutex_;
  bool stopped_ = false;
  std::vector<Held> held_;
};

class AdminService : public v1::AdminService::CallbackService {
 public:
  AdminService(const ServiceContext& context, v1::GetServerInfoResponse info, ShutdownFunction shutdown)
      : context_(context), info_(std::move(info)), shutdown_(std::move(shutdown)) {}

 private:
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override {
    return Answer(context, "AdminService/GetServerInfo", context_.metrics, *request, [&] {
      *response = info_;
      const auto uptime = std::chrono::steady_clock::now() - started_;
      response->set_uptime_seconds(std::chrono::duration_cast<std::chrono::seconds>(uptime).count());
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* Shutdown(grpc::CallbackServerContext* context, const v1::ShutdownRequest* request,
                                     v1::ShutdownResponse* response) override {
    const PendingCall call(context, "AdminService/Shutdown", context_.metrics);
    constexpr int kDefaultGraceSeconds = 30;
    if (request->grace_seconds() < 0 || request->grace_seconds() > kLongestGraceSeconds) {
      call.Done(InvalidFields(
          v1::REASON_INVALID_REQUEST,
          {{"grace_seconds", fmt::format("{} is outside of 0 to {}", request->grace_seconds(), kLongestGraceSeconds)}}));
      return call.reactor();
    }
    const std::chrono::seconds grace(request->grace_seconds() == 0 ? kDefaultGraceSeconds : request->grace_seconds());
    shutdown_(grace, [call, response](int jobs_ended) {
      response->set_jobs_ended(jobs_ended);
      call.Done(absl::OkStatus());
    });
    return call.reactor();
  }

  const ServiceContext context_;
  const v1::GetServerInfoResponse info_;
  const ShutdownFunction shutdown_;
  const Time started_ = std::chrono::steady_clock::now();
};

}  // namespace

std::unique_ptr<AgentCalls> MakeAgentService(const ServiceContext& context) { return std::make_unique<AgentService>(context); }

std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext& context, v1::GetServerInfoResponse info,
                                                ShutdownFunction shutdown) {
  return std::make_unique<AdminService>(context, std::move(info), std::move(shutdown));
}

}  // namespace mbridge::server
