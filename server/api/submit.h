// From a CreateJob request to a job: all checks of a submit, in one place.
//
// Order: request fields -> request id -> kind -> run name and start mode -> configuration -> what is left to do -> paths -> size
// -> preflight on a node -> stored. validate_only does the same and stops before the last step; a model that this version cannot
// train is shown with a warning instead of being refused. A repeated request id waits for the
// first request and gets the same answer; only successes are remembered. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/job_service.pb.h"
#include "server/api/recipe_source.h"
#include "server/nodes/controller.h"
#include "server/store/store.h"

namespace mbridge::server {

class Submitter {
 public:
  struct Options {
    std::vector<std::string> checkpoint_roots;  // The first is the default.
    std::vector<std::string> data_roots;        // Empty: data may lie anywhere.
    std::string build_id;
    std::chrono::milliseconds preflight_timeout{20'000};
    // A submit in this time after the start waits for the first node, so that it is checked against a machine.
    std::chrono::milliseconds node_wait{0};
  };
  using Answer = std::function<void(absl::StatusOr<v1::CreateJobResponse>)>;

  Submitter(Options options, RecipeSource recipes, Controller* controller, Store* store);

  // Calls `answer` once, on this thread or on the one that brings the preflight's result.
  void Submit(const v1::CreateJobRequest& request, Answer answer);
  void Tick();  // Lets those go on that waited for a node.
  void Stop();  // Lets all go on.

 private:
  struct Draft {
    v1::Job job;
    std::string request_id, body_hash;
    bool validate_only = false;
    std::string untrainable;         // Of a dry run: why a job is refused though its configuration is right.
    std::vector<std::string> notes;  // Become warnings of the resolved config.
  };

  void Begin(const v1::CreateJobRequest& request, Answer answer);
  enum class Twin { kNone, kAnswered, kWaits };
  absl::StatusOr<Twin> FindTwin(const v1::CreateJobRequest& request, const std::string& body_hash, const Answer& answer,
                                v1::CreateJobResponse* response);
  absl::StatusOr<Draft> Check(const v1::CreateJobRequest& request) const;
  void FindImportedAncestor(v1::Job* job) const;
  absl::Status CheckRest(Draft* draft) const;
  absl::Status CheckPaths(Draft* draft) const;
  absl::Status CheckSize(const Draft& draft) const;
  void Preflight(Draft draft, Answer answer);
  absl::StatusOr<v1::CreateJobResponse> Finish(Draft draft) const;
  void Reply(const std::string& request_id, const Answer& answer, const absl::StatusOr<v1::CreateJobResponse>& response);

  const Options options_;
  const RecipeSource recipes_;
  Controller* const controller_;
  Store* const store_;

  struct InFlight {
    std::string body_hash;
    std::vector<Answer> waiting;
  };
  std::mutex mutex_;
  std::map<std::string, InFlight> in_flight_;  // By request id.
  std::chrono::steady_clock::time_point node_deadline_;
  std::vector<std::pair<v1::CreateJobRequest, Answer>> waiting_for_node_;
};

}  // namespace mbridge::server
