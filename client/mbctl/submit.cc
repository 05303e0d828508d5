#include "client/mbctl/submit.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/config_source.h"
#include "client/mbctl/dry_run.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"
#include "recipes/config/text_form.h"
#include "recipes/config/word_option.h"

namespace mbridge::mbctl {
namespace {

// What the three commands have in common on the command line.
struct JobFlags {
  std::string name, device = "auto", request_id, time_limit;
  int ranks = 0;
  int priority = 50;
  bool priority_given = false;
  std::optional<int> max_restarts;
  std::vector<std::string> labels, overrides;
  bool dry_run = false, all_values = false;
  FollowFlags follow;
};

void AddJobFlags(CLI::App* command, JobFlags* flags) {
  command->add_option("OVERRIDES", flags->overrides, "key.path=value, as in Megatron-Bridge")->type_name("KEY=VALUE");
  command->add_option("--ranks", flags->ranks, "Processes; 0: the smallest number that the parallel sizes allow")
      ->check(CLI::Range(0, 1 << 20));
  command->add_option("--device", flags->device, "Where to train")->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command->add_option("--priority", flags->priority, "Higher starts first")->check(CLI::Range(0, 100));
  command->add_option("--label", flags->labels, "Label of the job, may be repeated")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
  command->add_option("--max-restarts", flags->max_restarts, "New attempts after a crash; default 3, 0 or -1: none")
      ->check(CLI::Range(-1, 1000));
  command->add_option("--time-limit", flags->time_limit, "End the job after this time (2h, 90m)")->type_name("TIME");
  command->add_option("--request-id", flags->request_id,
                      "UUID of this request: the same id again returns the first job. Made by itself where not given");
  command->add_flag("--dry-run", flags->dry_run, "Resolve and check everything, start nothing");
  command->add_flag("--all", flags->all_values, "With --dry-run: list values that stand at their default too");
  AddFollowFlags(command, &flags->follow, true);
}

absl::Status Invalid(const std::string& field, const std::string& description) {
  return InvalidFields(v1::REASON_INVALID_REQUEST, {{field, description}});
}

// Puts the flags that were given into `spec`.
absl::Status Apply(const JobFlags& flags, v1::JobSpec* spec) {
  spec->set_kind(v1::JOB_KIND_PRETRAIN);
  if (!flags.name.empty()) spec->set_run_name(flags.name);
  if (flags.ranks > 0) spec->set_ranks(flags.ranks);
  if (flags.device == "cpu") spec->set_device(v1::DEVICE_CPU);
  if (flags.device == "cuda") spec->set_device(v1::DEVICE_CUDA);
  if (flags.priority_given || spec->priority() == 0) spec->set_priority(flags.priority);
  if (flags.max_restarts) spec->set_max_restarts(*flags.max_restarts <= 0 ? -1 : *flags.max_restarts);
  if (!flags.time_limit.empty()) {
    MB_ASSIGN_OR_RETURN(const double seconds, ParseDuration(flags.time_limit));
    spec->set_wall_time_limit_seconds(static_cast<int64_t>(seconds));
  }
  for (const std::string& label : flags.labels) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) return Invalid("--label", fmt::format("'{}' is not KEY=VALUE", label));
    (*spec->mutable_labels())[label.substr(0, equals)] = label.substr(equals + 1);
  }
  const auto merged = MergeOverrides({spec->overrides().begin(), spec->overrides().end()}, flags.overrides);
  spec->clear_overrides();
  for (const std::string& line : merged) spec->add_overrides(line);
  return absl::OkStatus();
}

int DryRun(Session* session, const v1::Job& job, bool all_values) {
  if (session->format == "yaml") {
    session->out << recipes::ToYaml(job.resolved()) << std::flush;
    return client::kExitOk;
  }
  return session->Print(job.resolved(), job.resolved().recipe(), [&] { return DescribeResolved(job.resolved(), all_values); });
}

// Sends the request and does what was asked for after it.
int Submit(Session* session, const v1::JobSpec& spec, const JobFlags& flags) {
  MBCTL_ASSIGN_OR_FAIL(FollowOptions follow, *session, ToFollowOptions(flags.follow));
  MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
  v1::CreateJobRequest request;
  *request.mutable_spec() = spec;
  request.set_request_id(flags.request_id.empty() ? client::MakeRequestId() : flags.request_id);
  request.set_validate_only(flags.dry_run);
  auto created = client->CreateJob(request);
  if (!created.ok()) {
    const int code = session->Fail(created.status());
    if (code == client::kExitConnectionLost && !flags.dry_run) {
      session->Say(
          fmt::format("whether a job was made is unknown; repeat with --request-id {} to find out safely", request.request_id()));
    }
    return code;
  }
  const v1::Job& job = created->job();
  if (flags.dry_run) return DryRun(session, job, flags.all_values);

  const std::string& id = job.job_id();
  follow.throughput = job.resolved().config().logger().log_throughput();
  session->Say(fmt::format("{} {} (run {})", created->already_existed() ? "this request made job" : "job", id, job.run_name()));
  for (const v1::AutomaticChange& change : job.resolved().changes()) {
    session->Say(fmt::format("changed {}: {} -> {} ({})", change.key(), change.old_value(), change.new_value(), change.why()));
  }
  for (const std::string& warning : job.resolved().warnings()) {
    session->Say(warning.starts_with(kNotePrefix) ? warning : "warning: " + warning);
  }

  if (flags.follow.follow) {
    if (session->json()) session->out << ToJson(*created, false) << std::flush;
    if (session->format == "name") session->out << id << std::endl;
    return FollowJob(session, id, follow);
  }
  if (!flags.follow.wait) {
    session->Print(job, id, [&] { return id + "\n"; });
    session->Say(fmt::format("watch it: mbctl follow {}", id));
    return client::kExitOk;
  }
  if (session->format == "name" || session->format == "table") session->out << id << std::endl;
  const int code = FollowJob(session, id, follow);
  if (session->format == "json" || session->format == "yaml") {
    MBCTL_ASSIGN_OR_FAIL(const v1::Job ended, *session, client->GetJob(id));
    session->Print(ended, id, [] { return std::string(); });
  }
  return code;
}

absl::StatusOr<v1::StartMode> ParseStart(const std::string& start, bool has_checkpoint, bool weights_only) {
  const v1::StartMode mode = start == "resume" ? v1::START_MODE_RESUME
                             : start == "fork" ? v1::START_MODE_FORK
                                               : v1::START_MODE_FRESH;
  if (mode == v1::START_MODE_FRESH && has_checkpoint) {
    return Invalid("--from", "needs --start resume (same run) or --start fork (new run)");
  }
  if (mode == v1::START_MODE_FORK && !has_checkpoint) return Invalid("--from", "--start fork needs a checkpoint; mbctl ckpt ls");
  if (mode != v1::START_MODE_FORK && weights_only) return Invalid("--weights-only", "works with --start fork only");
  return mode;
}

// The newest committed checkpoint of a job's run; of the job itself where it has one.
absl::StatusOr<v1::Checkpoint> NewestCheckpoint(Session* session, client::Client* client, const v1::Job& job,
                                                std::optional<int64_t> step) {
  v1::ListCheckpointsRequest request;
  request.set_run_name(job.run_name());
  MB_ASSIGN_OR_RETURN(const auto checkpoints, client->ListCheckpoints(request));
  const v1::Checkpoint *best = nullptr, *corrupt = nullptr;
  std::string known;
  const auto rank = [&job](const v1::Checkpoint& c) {
    return std::make_tuple(c.job_id() == job.job_id(), c.step(), c.attempt());
  };
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    if (checkpoint.state() == v1::CHECKPOINT_STATE_CORRUPT && !step) corrupt = &checkpoint;
    if (checkpoint.state() != v1::CHECKPOINT_STATE_COMMITTED) continue;
    known += (known.empty() ? "" : ", ") + checkpoint.checkpoint_id();
    if (step && checkpoint.step() != *step) continue;
    if (best == nullptr || rank(checkpoint) > rank(*best)) best = &checkpoint;
  }
  if (best != nullptr) {
    if (corrupt != nullptr && corrupt->step() > best->step()) {
      session->Say(fmt::format("warning: {} is newer, but corrupt: {}", corrupt->checkpoint_id(), corrupt->detail()));
    }
    return *best;
  }
  return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_CHECKPOINT_NOT_FOUND,
                    fmt::format("run {} has no committed checkpoint{}; it has: {}", job.run_name(),
                                step ? fmt::format(" of step {}", *step) : "", known.empty() ? "none" : known));
}

// What `fork JOB[@step]` names: a checkpoint id, a job (or run) and a step, or the newest of a job.
absl::StatusOr<std::pair<v1::Job, v1::Checkpoint>> FindForkPoint(Session* session, client::Client* client,
                                                                 const std::string& text) {
  const size_t at = text.rfind('@');
  if (at == std::string::npos) {
    MB_ASSIGN_OR_RETURN(v1::Job job, FindJob(client, text));
    MB_ASSIGN_OR_RETURN(v1::Checkpoint checkpoint, NewestCheckpoint(session, client, job, std::nullopt));
    return std::make_pair(std::move(job), std::move(checkpoint));
  }
  auto exact = client->GetCheckpoint(text);
  if (exact.ok()) {
    MB_ASSIGN_OR_RETURN(v1::Job job, client->GetJob(exact->job_id()));
    return std::make_pair(std::move(job), *std::move(exact));
  }
  const std::string digits = text.substr(at + 1);
  const bool is_step = !digits.empty() && digits.size() < 18 && digits.find_first_not_of("0123456789") == std::string::npos;
  if (!absl::IsNotFound(exact.status()) || !is_step) return exact.status();
  auto job = FindJob(client, text.substr(0, at));
  if (!job.ok()) return exact.status();
  MB_ASSIGN_OR_RETURN(v1::Checkpoint checkpoint, NewestCheckpoint(session, client, *job, std::stoll(digits)));
  return std::make_pair(*std::move(job), std::move(checkpoint));
}

// The spec of `parent` for a job that goes on from it.
v1::JobSpec Continue(const v1::Job& parent) {
  v1::JobSpec spec = parent.spec();
  spec.clear_start();
  spec.clear_owner();
  spec.clear_run_name();
  return spec;
}

}  // namespace

std::vector<std::string> MergeOverrides(const std::vector<std::string>& earlier, const std::vector<std::string>& later) {
  const auto key = [](const std::string& line) {
    const size_t begin = std::min(line.find_first_not_of('+'), line.size());
    return recipes::CanonicalKey(line.substr(begin, line.find('=') - begin));
  };
  std::vector<std::string> merged;
  for (const std::string& line : earlier) {
    const bool replaced = std::any_of(later.begin(), later.end(), [&](const auto& other) { return key(other) == key(line); });
    if (!replaced) merged.push_back(line);
  }
  merged.insert(merged.end(), later.begin(), later.end());
  return merged;
}

void AddSubmit(CLI::App* app, Session* session) {
  struct Flags : JobFlags {
    ConfigSource source;
    std::string start = "fresh", from;
    bool weights_only = false, local = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("submit", "Start a training job");
  AddConfigSource(command, &flags->source);
  command->add_option("-n,--name", flags->name, "Run name; without it each job gets a fresh one");
  command->add_option("--start", flags->start, "fresh, resume (same run, from its newest or --from checkpoint) or fork (new run)")
      ->check(recipes::OneOf({"fresh", "resume", "fork"}));
  command->add_option("--from", flags->from, "Checkpoint id, RUN@STEP")->type_name("CKPT");
  command->add_flag("--weights-only", flags->weights_only, "With --start fork: optimizer, schedule and data start anew");
  command->add_flag("--local", flags->local, "With --dry-run: resolve in mbctl, ask no coordinator");
  AddJobFlags(command, flags.get());
  command->footer(
      "Examples:\n"
      "  mbctl submit --recipe vanilla_gpt_megatron_lm_config --follow model.num_layers=2 model.hidden_size=256 \\\n"
      "    model.num_attention_heads=4 train.train_iters=10 train.global_batch_size=32\n"
      "  mbctl submit -r vanilla_gpt_pretrain_config --dry-run -o yaml model.num_layers=2 model.hidden_size=256 \\\n"
      "    model.num_attention_heads=4 > run.yaml\n"
      "  mbctl submit --hf /models/llama --start fork --from base@0 --weights-only model.seq_length=2048 # of an import\n"
      "  mbctl submit -c run.yaml --start fork --from base@1000 -n tuned optimizer.lr=1e-4\n"
      "  id=$(mbctl submit -c run.yaml -o name)\n"
      "  mbctl submit -c run.yaml --wait --timeout 2h --request-id \"$CI_UUID\" -o json   # in CI");
  command->callback([=] {
    flags->priority_given = command->count("--priority") > 0;
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(v1::JobSpec spec, *session, ReadConfigSource(session, flags->source, flags->local));
      MBCTL_ASSIGN_OR_FAIL(const v1::StartMode mode, *session,
                           ParseStart(flags->start, !flags->from.empty(), flags->weights_only));
      spec.mutable_start()->set_mode(mode);
      spec.mutable_start()->set_checkpoint_id(flags->from);
      spec.mutable_start()->set_weights_only(flags->weights_only);
      if (const absl::Status status = Apply(*flags, &spec); !status.ok()) return session->Fail(status);
      if (!flags->local) return Submit(session, spec, *flags);
      if (!flags->dry_run) return session->Usage("--local needs --dry-run");
      v1::Job job;
      MBCTL_ASSIGN_OR_FAIL(*job.mutable_resolved(), *session, ResolveLocally(spec, true));
      return DryRun(session, job, flags->all_values);
    };
  });
}

void AddResume(CLI::App* app, Session* session) {
  struct Flags : JobFlags {
    std::string job, from;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("resume", "Go on with a run from a committed checkpoint, as a new job");
  command->add_option("JOB", flags->job, "Job id or run name")->required();
  command->add_option("--from", flags->from, "Checkpoint id; without it the run's newest committed one")->type_name("CKPT");
  AddJobFlags(command, flags.get());
  command->footer(
      "The recipe and the overrides are the job's; further ones are added or replace them:\n"
      "  mbctl resume my-run\n"
      "  mbctl resume j-0123456789ab --from my-run@500 train.train_iters=2000 scheduler.lr_decay_iters=2000 --follow");
  command->callback([=] {
    flags->priority_given = command->count("--priority") > 0;
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const v1::Job parent, *session, FindJob(client, flags->job));
      v1::JobSpec spec = Continue(parent);
      spec.set_run_name(parent.run_name());
      spec.mutable_start()->set_mode(v1::START_MODE_RESUME);
      spec.mutable_start()->set_checkpoint_id(flags->from);
      if (const absl::Status status = Apply(*flags, &spec); !status.ok()) return session->Fail(status);
      // The newest of a run may be one that failed over an override.
      session->Say(fmt::format("recipe and overrides of {} ({}); others: resume JOB", parent.job_id(),
                               StripPrefix(v1::JobState_Name(parent.state()), "JOB_STATE_")));
      return Submit(session, spec, *flags);
    };
  });
}

void AddFork(CLI::App* app, Session* session) {
  struct Flags : JobFlags {
    std::string from;
    bool weights_only = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("fork", "Start a new run from a checkpoint of another");
  command->add_option("FROM", flags->from, "JOB, JOB@STEP, RUN@STEP or a checkpoint id; without a step the newest")->required();
  command->add_option("-n,--name", flags->name, "Name of the new run");
  command->add_flag("--weights-only", flags->weights_only, "Optimizer, schedule and data start anew");
  AddJobFlags(command, flags.get());
  command->footer(
      "Examples:\n"
      "  mbctl fork my-run@500 optimizer.lr=1e-4 --name lower-rate --follow\n"
      "  mbctl fork j-0123456789ab --weights-only");
  command->callback([=] {
    flags->priority_given = command->count("--priority") > 0;
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const auto point, *session, FindForkPoint(session, client, flags->from));
      v1::JobSpec spec = Continue(point.first);
      spec.mutable_start()->set_mode(v1::START_MODE_FORK);
      spec.mutable_start()->set_checkpoint_id(point.second.checkpoint_id());
      spec.mutable_start()->set_weights_only(flags->weights_only);
      if (const absl::Status status = Apply(*flags, &spec); !status.ok()) return session->Fail(status);
      session->Say(fmt::format("fork of {} (step {})", point.second.checkpoint_id(), point.second.step()));
      return Submit(session, spec, *flags);
    };
  });
}

}  // namespace mbridge::mbctl
