#include "client/mbctl/model_recipe.h"

#include <filesystem>

#include "client/mbctl/rank_program.h"
#include "client/mbctl/session.h"
#include "mbridge/v1/job.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/assignment.h"

namespace mbridge::mbctl {
namespace {

absl::StatusOr<std::string> AskNode(Session* session, const std::string& model) {
  MB_ASSIGN_OR_RETURN(client::Client * client, session->Connect());
  v1::CreateJobRequest request;
  request.set_validate_only(true);
  request.mutable_spec()->set_kind(v1::JOB_KIND_CONVERT);
  request.mutable_spec()->mutable_convert()->set_action(v1::CONVERT_ACTION_RECIPE);
  request.mutable_spec()->mutable_convert()->set_hugging_face(model);
  MB_ASSIGN_OR_RETURN(const v1::CreateJobResponse response, client->CreateJob(request));
  if (!response.job().spec().config_yaml().empty()) return response.job().spec().config_yaml();
  std::string why;
  for (const std::string& warning : response.job().resolved().warnings()) why += (why.empty() ? "" : "; ") + warning;
  return MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_NOT_ENOUGH_RESOURCES,
                    "no node could read " + model + ": " + why + ". mbctl node ls shows the nodes");
}

}  // namespace

absl::Status AddModel(Session* session, const std::string& model, bool local, v1::JobSpec* spec) {
  const std::string place = AbsoluteModel(model);
  std::string yaml;
  if (local) {
    MB_ASSIGN_OR_RETURN(yaml, OutputOfRankProgram({"convert", "recipe", "--hf", place}));
  } else {
    MB_ASSIGN_OR_RETURN(yaml, AskNode(session, place));
  }
  MB_ASSIGN_OR_RETURN(*spec->mutable_config_yaml(), recipes::MergeConfigFiles(yaml, spec->config_yaml()));
  return absl::OkStatus();
}

std::string AbsoluteModel(const std::string& text) {
  std::error_code error;
  if (text.empty() || !std::filesystem::exists(text, error)) return text;
  return std::filesystem::absolute(text, error).lexically_normal().string();
}

}  // namespace mbridge::mbctl
