#include <algorithm>

#include "mbridge/v1/node_service.grpc.pb.h"
#include "mbridge/v1/recipe_service.grpc.pb.h"
#include "server/api/call.h"
#include "server/api/paging.h"
#include "server/api/services.h"

namespace mbridge::server {
namespace {

class NodeService : public v1::NodeService::CallbackService {
 public:
  explicit NodeService(const ServiceContext& context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* ListNodes(grpc::CallbackServerContext* context, const v1::ListNodesRequest* request,
                                      v1::ListNodesResponse* response) override {
    return Answer(context, "NodeService/ListNodes", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(const int size, PageSize(request->page_size()));
      MB_ASSIGN_OR_RETURN(const std::string after, ParsePageToken("nodes", request->page_token()));
      for (auto& node : context_.controller->ListNodes()) {
        if (!after.empty() && node.node_id() <= after) continue;
        if (response->nodes_size() == size) {
          response->set_next_page_token(MakePageToken("nodes", response->nodes(size - 1).node_id()));
          break;
        }
        *response->add_nodes() = std::move(node);
      }
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* DrainNode(grpc::CallbackServerContext* context, const v1::DrainNodeRequest* request,
                                      v1::DrainNodeResponse* response) override {
    return Answer(context, "NodeService/DrainNode", context_.metrics, *request, [&]() -> absl::Status {
      MB_ASSIGN_OR_RETURN(*response->mutable_node(),
                          context_.controller->DrainNode(request->node_id(), request->drain(), request->reason()));
      return absl::OkStatus();
    });
  }

  const ServiceContext context_;
};

class RecipeService : public v1::RecipeService::CallbackService {
 public:
  explicit RecipeService(const ServiceContext& context) : context_(context) {}

 private:
  grpc::ServerUnaryReactor* ListRecipes(grpc::CallbackServerContext* context, const v1::ListRecipesRequest* request,
                                        v1::ListRecipesResponse* response) override {
    return Answer(context, "RecipeService/ListRecipes", context_.metrics, *request, [&] {
      for (auto& recipe : context_.recipes->list()) *response->add_recipes() = std::move(recipe);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ShowRecipe(grpc::CallbackServerContext* context, const v1::ShowRecipeRequest* request,
                                       v1::ShowRecipeResponse* response) override {
    return Answer(context, "RecipeService/ShowRecipe", context_.metrics, *request, [&]() -> absl::Status {
      if (!request->recipe().empty()) {
        MB_ASSIGN_OR_RETURN(*response->mutable_recipe(), context_.recipes->find(request->recipe()));
      }
      recipes::ResolveRequest resolve;
      resolve.recipe = request->recipe();
      resolve.config_yaml = request->config_yaml();
      resolve.overrides.assign(request->overrides().begin(), request->overrides().end());
      resolve.ranks = request->ranks();
      resolve.require_trainable = false;
      MB_ASSIGN_OR_RETURN(*response->mutable_resolved(), context_.recipes->resolve(resolve));
      return absl::OkStatus();
    });
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeNodeService(const ServiceContext& context) { return std::make_unique<NodeService>(context); }
std::unique_ptr<grpc::Service> MakeRecipeService(const ServiceContext& context) {
  return std::make_unique<RecipeService>(context);
}

}  // namespace mbridge::server
