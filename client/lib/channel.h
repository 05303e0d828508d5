// What the calls of one Client share: the channel, the stubs and the options. Internal to client/lib.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "client/lib/client.h"
#include "mbridge/v1/admin_service.grpc.pb.h"
#include "mbridge/v1/checkpoint_service.grpc.pb.h"
#include "mbridge/v1/job_service.grpc.pb.h"
#include "mbridge/v1/node_service.grpc.pb.h"
#include "mbridge/v1/recipe_service.grpc.pb.h"

namespace mbridge::client {

struct Client::Impl {
  ConnectionOptions options;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::JobService::Stub> jobs;
  std::unique_ptr<v1::RecipeService::Stub> recipes;
  std::unique_ptr<v1::CheckpointService::Stub> checkpoints;
  std::unique_ptr<v1::NodeService::Stub> nodes;
  std::unique_ptr<v1::AdminService::Stub> admin;
};

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectionOptions& options);

}  // namespace mbridge::client
