// The services of the API, each behind its gRPC interface. Thread-safe; `context` outlives them.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <functional>
#include <memory>
#include <vector>

#include "mbridge/v1/admin_service.pb.h"
#include "server/api/context.h"

namespace mbridge::server {

std::unique_ptr<grpc::Service> MakeJobService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeCheckpointService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeNodeService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeRecipeService(const ServiceContext& context);

// `shutdown(grace, done)` ends all jobs and calls done(number) before it ends the server.
using ShutdownFunction = std::function<void(std::chrono::seconds grace, std::function<void(int)> done)>;
std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext& context, v1::GetServerInfoResponse info,
                                                ShutdownFunction shutdown);

// AgentService with its held calls.
class AgentCalls {
 public:
  virtual ~AgentCalls() = default;
  virtual grpc::Service* service() = 0;
  virtual void NodeChanged(const std::string& node_id) = 0;  // Answers the calls that have news.
  virtual void Tick() = 0;                                   // Answers those whose time is over.
  virtual void Stop() = 0;                                   // Answers all, now and later.
};
std::unique_ptr<AgentCalls> MakeAgentService(const ServiceContext& context);

}  // namespace mbridge::server
