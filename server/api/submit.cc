#include "server/api/submit.h"

#include <fmt/format.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <xxhash.h>

#include <algorithm>
#include <ctime>

#include "proto/rpc/status_details.h"
#include "server/api/convert.h"
#include "server/nodes/names.h"
#include "server/nodes/rank_specs.h"

namespace mbridge::server {
namespace {

constexpr int kMaxOverrides = 10'000;
constexpr size_t kMaxOverrideLength = 64 << 10;
constexpr size_t kMaxConfigFile = 1 << 20;
constexpr int kMaxLabels = 64;
constexpr size_t kMaxLabelLength = 256;
constexpr int kMaxPriority = 100, kDefaultPriority = 50;
constexpr int kMaxRanks = 1 << 20;

// The same for equal specs, map order or not.
std::string HashOf(const v1::JobSpec& spec) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    spec.SerializeToCodedStream(&coded);
  }
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

absl::Status CheckFields(const v1::CreateJobRequest& request) {
  std::vector<FieldViolation> wrong;
  const v1::JobSpec& spec = request.spec();
  const auto limit = [&](const std::string& field, size_t value, size_t most) {
    if (value > most) wrong.push_back({field, fmt::format("has {}, at most {} are allowed", value, most)});
  };
  limit("request_id", request.request_id().size(), 128);
  limit("spec.recipe", spec.recipe().size(), 256);
  limit("spec.config_yaml", spec.config_yaml().size(), kMaxConfigFile);
  limit("spec.overrides", static_cast<size_t>(spec.overrides_size()), kMaxOverrides);
  for (const std::string& text : spec.overrides()) {
    if (text.size() > kMaxOverrideLength) {
      limit(text.substr(0, std::min<size_t>(text.find('='), 80)), text.size(), kMaxOverrideLength);
    }
  }
  limit("spec.labels", static_cast<size_t>(spec.labels_size()), kMaxLabels);
  for (const auto& [key, value] : spec.labels()) {
    limit("spec.labels." + key.substr(0, 80), std::max(key.size(), value.size()), kMaxLabelLength);
    if (key.empty() || key.find_first_of("=, ") != std::string::npos) {
      wrong.push_back({"spec.labels", fmt::format("'{}' must not be empty or hold '=', ',' or a space", key.substr(0, 80))});
    }
  }
  const auto range = [&](const char* field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) wrong.push_back({field, fmt::format("{} is outside of {} to {}", value, low, high)});
  };
  range("spec.priority", spec.priority(), 0, kMaxPriority);
  range("spec.ranks", spec.ranks(), 0, kMaxRanks);
  range("spec.max_restarts", spec.max_restarts(), -1, 1000);
  range("spec.wall_time_limit_seconds", spec.wall_time_limit_seconds(), 0, int64_t{10} * 365 * 24 * 3600);
  if (!v1::Device_IsValid(spec.device())) wrong.push_back({"spec.device", "is not one of auto, cpu, cuda"});
  if (!v1::StartMode_IsValid(spec.start().mode())) wrong.push_back({"spec.start.mode", "is not one of fresh, resume, fork"});
  const bool fresh = spec.start().mode() == v1::START_MODE_FRESH || spec.start().mode() == v1::START_MODE_UNSPECIFIED;
  if (fresh && !spec.start().checkpoint_id().empty()) {
    wrong.push_back(
        {"spec.start.checkpoint_id", fmt::format("'{}' has no meaning for a fresh start; use --start resume (same run) or "
                                                 "--start fork (new run)",
                                                 spec.start().checkpoint_id())});
  }
  if (spec.start().weights_only() && spec.start().mode() != v1::START_MODE_FORK) {
    wrong.push_back({"spec.start.weights_only", "is for --start fork only"});
  }
  if (spec.kind() == v1::JOB_KIND_CONVERT) {
    for (FieldViolation& violation : CheckConvertFields(spec, request.validate_only())) wrong.push_back(std::move(violation));
  } else if (spec.recipe().empty() && spec.config_yaml().empty()) {
    wrong.push_back({"spec.recipe", "is empty; `mbctl recipe ls` lists the recipes"});
  }
  if (!spec.run_name().empty()) {
    if (const std::string why = WhyNotARunName(spec.run_name()); !why.empty()) wrong.push_back({"spec.run_name", why});
  }
  if (wrong.empty()) return absl::OkStatus();
  return InvalidFields(v1::REASON_INVALID_REQUEST, wrong);
}

absl::Status CheckKind(v1::JobKind kind) {
  if (kind == v1::JOB_KIND_PRETRAIN || kind == v1::JOB_KIND_CONVERT || kind == v1::JOB_KIND_UNSPECIFIED) return absl::OkStatus();
  return MakeStatus(absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_JOB_KIND,
                    fmt::format("this version runs pretrain and convert jobs, not {}", v1::JobKind_Name(kind)));
}

std::string Join(const std::vector<std::string>& roots) { return fmt::format("{}", fmt::join(roots, ", ")); }

bool BeneathOne(const std::string& path, const std::vector<std::string>& roots) {
  return std::any_of(roots.begin(), roots.end(), [&](const std::string& root) { return IsBeneath(path, root); });
}

// A violation of the run's request for every problem that the node found; the first reason names the status.
absl::Status FromPreflight(const v1::PreflightResult& result) {
  if (result.problems().empty()) return absl::OkStatus();
  std::vector<FieldViolation> wrong;
  for (const auto& problem : result.problems()) wrong.push_back({problem.field(), problem.description()});
  const v1::Reason reason = result.problems(0).reason();
  return InvalidFields(reason == v1::REASON_UNSPECIFIED ? v1::REASON_INVALID_CONFIG : reason, wrong);
}

}  // namespace

Submitter::Submitter(Options options, RecipeSource recipes, Controller* controller, Store* store)
    : options_(std::move(options)),
      recipes_(std::move(recipes)),
      controller_(controller),
      store_(store),
      node_deadline_(std::chrono::steady_clock::now() + options_.node_wait) {}

void Submitter::Submit(const v1::CreateJobRequest& request, Answer answer) {
  if (!controller_->PreflightNode(v1::DEVICE_UNSPECIFIED)) {
    std::lock_guard lock(mutex_);
    if (std::chrono::steady_clock::now() < node_deadline_) {
      waiting_for_node_.emplace_back(request, std::move(answer));
      return;
    }
  }
  Begin(request, std::move(answer));
}

void Submitter::Tick() {
  std::vector<std::pair<v1::CreateJobRequest, Answer>> released;
  {
    std::lock_guard lock(mutex_);
    if (waiting_for_node_.empty()) return;
    const bool node = controller_->PreflightNode(v1::DEVICE_UNSPECIFIED).has_value();
    if (!node && std::chrono::steady_clock::now() < node_deadline_) return;
    released.swap(waiting_for_node_);
  }
  for (auto& [request, answer] : released) Begin(request, std::move(answer));
}

void Submitter::Stop() {
  {
    std::lock_guard lock(mutex_);
    node_deadline_ = {};
  }
  Tick();
}

void Submitter::Begin(const v1::CreateJobRequest& request, Answer answer) {
  const std::string body_hash = HashOf(request.spec());
  const std::string request_id = request.validate_only() ? "" : request.request_id();
  if (absl::Status fields = CheckFields(request); !fields.ok()) return answer(fields);
  if (!request_id.empty()) {
    v1::CreateJobResponse earlier;
    const auto twin = FindTwin(request, body_hash, answer, &earlier);
    if (!twin.ok()) return answer(twin.status());
    if (*twin == Twin::kAnswered) return answer(std::move(earlier));
    if (*twin == Twin::kWaits) return;
  }
  auto draft = Check(request);
  if (!draft.ok()) return Reply(request_id, answer, draft.status());
  draft->request_id = request_id;
  draft->body_hash = body_hash;
  if (!draft->untrainable.empty()) return Reply(request_id, answer, Finish(std::move(draft).value()));
  Preflight(std::move(draft).value(), std::move(answer));
}

// An earlier request with the same id: done (its job goes to `response`) or in flight (`answer` waits with it).
absl::StatusOr<Submitter::Twin> Submitter::FindTwin(const v1::CreateJobRequest& request, const std::string& body_hash,
                                                    const Answer& answer, v1::CreateJobResponse* response) {
  const std::string& request_id = request.request_id();
  const auto reused = [&] {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_REQUEST_ID_REUSED,
                      fmt::format("request id {} was used for another request; use a new one", request_id));
  };
  std::lock_guard lock(mutex_);
  // The store is asked under the lock: a twin leaves in_flight_ only after its job is stored.
  MB_ASSIGN_OR_RETURN(const auto known, store_->FindRequest(request_id));
  if (known) {
    if (known->body_hash != body_hash) return reused();
    MB_ASSIGN_OR_RETURN(*response->mutable_job(), controller_->GetJob(known->job_id));
    MB_ASSIGN_OR_RETURN(*response->mutable_job()->mutable_resolved(), store_->GetResolved(known->job_id));
    response->set_already_existed(true);
    return Twin::kAnswered;
  }
  const auto [entry, fresh] = in_flight_.try_emplace(request_id, InFlight{body_hash, {}});
  if (fresh) return Twin::kNone;
  if (entry->second.body_hash != body_hash) return reused();
  entry->second.waiting.push_back(answer);
  return Twin::kWaits;
}

void Submitter::Reply(const std::string& request_id, const Answer& answer,
                      const absl::StatusOr<v1::CreateJobResponse>& response) {
  std::vector<Answer> waiting;
  if (!request_id.empty()) {
    std::lock_guard lock(mutex_);
    waiting = std::move(in_flight_[request_id].waiting);
    in_flight_.erase(request_id);
  }
  answer(response);
  auto repeated = response;
  if (repeated.ok()) repeated->set_already_existed(true);
  for (const Answer& twin : waiting) twin(repeated);
}

absl::StatusOr<Submitter::Draft> Submitter::Check(const v1::CreateJobRequest& request) const {
  MB_RETURN_IF_ERROR(CheckKind(request.spec().kind()));
  Draft draft;
  draft.validate_only = request.validate_only();
  v1::Job& job = draft.job;
  *job.mutable_spec() = request.spec();
  const bool convert = job.spec().kind() == v1::JOB_KIND_CONVERT;
  if (!convert) job.mutable_spec()->set_kind(v1::JOB_KIND_PRETRAIN);
  job.mutable_spec()->clear_owner();  // Nobody is authenticated yet, so nobody's word is taken for it.
  if (job.spec().priority() == 0) job.mutable_spec()->set_priority(kDefaultPriority);
  const v1::JobSpec& spec = job.spec();
  job.set_run_name(spec.run_name());
  if (job.run_name().empty() && spec.start().mode() == v1::START_MODE_RESUME && !spec.start().checkpoint_id().empty()) {
    MB_ASSIGN_OR_RETURN(const v1::Checkpoint source, store_->GetCheckpoint(spec.start().checkpoint_id()));
    job.set_run_name(source.run_name());  // "Resume this checkpoint" names its run.
  }
  if (job.run_name().empty()) {
    if (spec.start().mode() == v1::START_MODE_RESUME) {
      return InvalidFields(v1::REASON_INVALID_REQUEST,
                           {{"spec.run_name", "a resume needs the run: --name RUN or --from CHECKPOINT"}});
    }
    job.set_run_name(NewRunName());
  }
  MB_ASSIGN_OR_RETURN(const Controller::StartPoint source, controller_->CheckStart(spec.start(), job.run_name()));
  job.mutable_spec()->mutable_start()->set_checkpoint_id(source.checkpoint_id);

  if (convert) {
    if (job.spec().convert().action() == v1::CONVERT_ACTION_EXPORT) FindImportedAncestor(&job);
    MB_RETURN_IF_ERROR(PrepareConvert({options_.checkpoint_roots, options_.data_roots}, &job));
    MB_RETURN_IF_ERROR(CheckSize(draft));
    job.set_job_id(NewJobId(std::chrono::system_clock::now()));
    return draft;
  }
  recipes::ResolveRequest resolve;
  resolve.recipe = spec.recipe();
  resolve.config_yaml = spec.config_yaml();
  resolve.overrides.assign(spec.overrides().begin(), spec.overrides().end());
  resolve.ranks = spec.ranks();
  resolve.kind = spec.kind();
  const auto node = controller_->PreflightNode(spec.device());
  const bool gpus = spec.device() == v1::DEVICE_UNSPECIFIED && node && node->inventory().gpus_size() > 0;
  resolve.device = gpus ? v1::DEVICE_CUDA : spec.device();
  auto resolved = recipes_.resolve(resolve);
  if (draft.validate_only && ReasonOf(resolved.status()) == v1::REASON_UNSUPPORTED_MODEL) {
    draft.untrainable = std::string(resolved.status().message());
    draft.notes.push_back("a submit is refused: " + draft.untrainable);
    resolve.require_trainable = false;
    resolved = recipes_.resolve(resolve);
  }
  MB_RETURN_IF_ERROR(resolved.status());
  *job.mutable_resolved() = *std::move(resolved);
  if (source.corrupt) {
    v1::AutomaticChange* change = job.mutable_resolved()->add_changes();
    change->set_key("start.checkpoint_id");
    change->set_old_value(source.corrupt->checkpoint_id());
    change->set_new_value(source.checkpoint_id);
    change->set_why(fmt::format("{} is the newest, but corrupt: {}", source.corrupt->checkpoint_id(), source.corrupt->detail()));
  }
  MB_RETURN_IF_ERROR(CheckRest(&draft));
  MB_RETURN_IF_ERROR(CheckPaths(&draft));
  if (draft.untrainable.empty()) MB_RETURN_IF_ERROR(CheckSize(draft));
  job.set_job_id(NewJobId(std::chrono::system_clock::now()));
  return draft;
}

// An export takes config.json and tokenizer from the import that the run began with, unless the request says otherwise.
void Submitter::FindImportedAncestor(v1::Job* job) const {
  v1::ConvertSpec* convert = job->mutable_spec()->mutable_convert();
  if (!convert->like().empty() || !convert->model_type().empty()) return;
  constexpr int kMostForks = 1000;
  std::string id = job->spec().start().checkpoint_id();
  for (int i = 0; i < kMostForks && !id.empty(); ++i) {
    const auto checkpoint = store_->GetCheckpoint(id);
    if (!checkpoint.ok()) return;
    if (checkpoint->step() == 0 && !checkpoint->has_optimizer_state()) {
      if (i > 0) convert->set_like(checkpoint->path());
      return;
    }
    id = checkpoint->parent_checkpoint_id();
  }
}

// A checkpoint of the last iteration leaves at most the evaluation after training, where its job ended before that.
absl::Status Submitter::CheckRest(Draft* draft) const {
  const v1::StartSpec& start = draft->job.spec().start();
  const v1::ConfigContainer& config = draft->job.resolved().config();
  if (start.checkpoint_id().empty() || start.weights_only() || !config.train().has_train_iters()) return absl::OkStatus();
  MB_ASSIGN_OR_RETURN(const v1::Checkpoint source, store_->GetCheckpoint(start.checkpoint_id()));
  const int64_t iterations = config.train().train_iters();
  if (source.step() < iterations) return absl::OkStatus();
  const bool trained = start.mode() == v1::START_MODE_RESUME && source.step() == iterations;
  const auto writer = store_->GetJob(source.job_id());
  const bool evaluated = config.validation().eval_iters() == 0 || (writer.ok() && writer->state() == v1::JOB_STATE_SUCCEEDED);
  if (trained && !evaluated) {
    draft->notes.push_back(
        fmt::format("note: all {} iterations are trained and saved; what is left is the evaluation after them", iterations));
    return absl::OkStatus();
  }
  return InvalidFields(
      v1::REASON_INVALID_CONFIG,
      {{"train.train_iters",
        fmt::format(
            "{} iterations, but the checkpoint is of iteration {}: nothing is left to train. Give train.train_iters above {}",
            iterations, source.step(), source.step())}});
}

absl::Status Submitter::CheckPaths(Draft* draft) const {
  v1::Job& job = draft->job;
  std::vector<FieldViolation> outside;
  std::string root = options_.checkpoint_roots.front();
  if (const std::string& save = job.resolved().config().checkpoint().save(); !save.empty()) {
    if (!BeneathOne(save, options_.checkpoint_roots)) {
      outside.push_back(
          {"checkpoint.save", fmt::format("{} is not in a checkpoint root of the coordinator ({}); leave it out or choose a "
                                          "path there",
                                          save, Join(options_.checkpoint_roots))});
    }
    root = save;
  }
  job.set_run_directory(root + "/" + job.run_name());
  // The rank writes index files there.
  if (const std::string& cache = job.resolved().config().dataset().path_to_cache();
      !cache.empty() && !BeneathOne(cache, options_.checkpoint_roots) && !BeneathOne(cache, options_.data_roots)) {
    outside.push_back(
        {"dataset.path_to_cache", fmt::format("{} is in no checkpoint or data root of the coordinator ({}{}{}); leave it "
                                              "out or choose a path there",
                                              cache, Join(options_.checkpoint_roots), options_.data_roots.empty() ? "" : ", ",
                                              Join(options_.data_roots))});
  }
  if (!options_.data_roots.empty()) {
    for (const std::string& prefix : job.resolved().config().dataset().blend().prefixes()) {
      if (BeneathOne(prefix, options_.data_roots)) continue;
      outside.push_back(
          {"dataset.blend", fmt::format("{} is not in a data root of the coordinator ({})", prefix, Join(options_.data_roots))});
    }
  }
  if (outside.empty()) return absl::OkStatus();
  return InvalidFields(v1::REASON_PATH_OUTSIDE_ROOTS, outside);
}

absl::Status Submitter::CheckSize(const Draft& draft) const {
  const int ranks = std::max(1, draft.job.resolved().ranks());
  if (const std::string never = controller_->WhyNeverFits(ranks, draft.job.spec().device()); !never.empty()) {
    return MakeStatus(absl::StatusCode::kFailedPrecondition, v1::REASON_NOT_ENOUGH_RESOURCES,
                      never + "; use fewer --ranks or connect more nodes");
  }
  return absl::OkStatus();
}

void Submitter::Preflight(Draft draft, Answer answer) {
  const int ranks = std::max(1, draft.job.resolved().ranks());
  const auto node = controller_->PreflightNode(draft.job.spec().device());
  if (!node) {
    draft.notes.push_back("no node is connected: data, memory and disk are checked when the job starts");
    const std::string request_id = draft.request_id;
    return Reply(request_id, answer, Finish(std::move(draft)));
  }
  v1::Attempt attempt;
  for (int rank = 0; rank < ranks; ++rank) {
    v1::RankPlacement* place = attempt.add_placement();
    place->set_rank(rank);
    place->set_threads(std::max(1, node->inventory().cpu_cores() / ranks));
    const bool cuda = draft.job.spec().device() != v1::DEVICE_CPU && node->inventory().gpus_size() > 0;
    if (cuda) place->set_gpu_uuid(node->inventory().gpus(rank % node->inventory().gpus_size()).uuid());
  }
  std::optional<v1::Checkpoint> source;
  if (const std::string& id = draft.job.spec().start().checkpoint_id(); !id.empty()) {
    auto found = store_->GetCheckpoint(id);
    if (!found.ok()) return Reply(draft.request_id, answer, found.status());
    source = std::move(found).value();
  }
  v1::NodeTask task;
  task.set_task_id(NewId("preflight-"));
  v1::RankSpec* const spec = task.mutable_preflight()->mutable_spec();
  *spec = MakeRankSpec(draft.job, attempt, attempt.placement(0), draft.job.resolved(), source ? &*source : nullptr,
                       options_.build_id);
  spec->set_gpus(controller_->Gpus());
  int64_t smallest = 0;  // Memory of the node's GPUs; those of other nodes are checked by the ranks.
  for (const v1::Gpu& gpu : node->inventory().gpus()) {
    smallest = smallest == 0 ? gpu.memory_bytes() : std::min<int64_t>(smallest, gpu.memory_bytes());
    if (gpu.uuid() == spec->gpu_uuid()) *spec->mutable_gpu() = gpu;
  }
  spec->set_gpu_memory_bytes(smallest);
  auto shared = std::make_shared<Draft>(std::move(draft));
  controller_->RunTask(
      node->node_id(), std::move(task), options_.preflight_timeout,
      [this, shared, answer = std::move(answer)](const absl::StatusOr<v1::TaskResult>& result) {
        const std::string request_id = shared->request_id;
        if (result.ok()) {
          v1::PreflightResult preflight = result->preflight();
          for (auto& problem : *preflight.mutable_problems()) {
            const std::string& from = shared->job.spec().start().checkpoint_id();
            if (problem.reason() != v1::REASON_CHECKPOINT_CORRUPT || from.empty()) continue;
            problem.set_description(problem.description() + "; " + controller_->RecordCorruption(from, problem.description()));
          }
          if (absl::Status problems = FromPreflight(preflight); !problems.ok()) return Reply(request_id, answer, problems);
          if (preflight.has_memory()) {  // The engine's own plan in place of the estimate.
            v1::MemoryEstimate* estimate = shared->job.mutable_resolved()->mutable_per_rank();
            preflight.mutable_memory()->set_checkpoint_bytes(estimate->checkpoint_bytes());
            *estimate = preflight.memory();
          }
          for (const std::string& warning : result->preflight().warnings()) shared->notes.push_back(warning);
          if (shared->validate_only) {
            if (!preflight.config_yaml().empty()) shared->job.mutable_spec()->set_config_yaml(preflight.config_yaml());
            for (const std::string& fact : result->preflight().facts()) shared->notes.push_back("note: " + fact);
          }
        }
        if (!result.ok() || !result->ok()) {
          shared->notes.push_back(
              fmt::format("the preflight gave no answer ({}): data, memory and disk are checked when the job starts",
                          result.ok() ? result->detail() : std::string(result.status().message())));
        }
        Reply(request_id, answer, Finish(std::move(*shared)));
      });
}

absl::StatusOr<v1::CreateJobResponse> Submitter::Finish(Draft draft) const {
  for (std::string& note : draft.notes) draft.job.mutable_resolved()->add_warnings(std::move(note));
  v1::CreateJobResponse response;
  if (draft.validate_only) {
    draft.job.clear_job_id();
    *response.mutable_job() = std::move(draft.job);
    return response;
  }
  std::optional<IdempotencyRecord> record;
  if (!draft.request_id.empty()) {
    record = IdempotencyRecord{draft.request_id, draft.job.job_id(), draft.body_hash, std::time(nullptr)};
  }
  MB_ASSIGN_OR_RETURN(*response.mutable_job(), controller_->AddJob(std::move(draft.job), std::move(record)));
  return response;
}

}  // namespace mbridge::server
