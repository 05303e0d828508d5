// The state machine against a fake agent and a clock that the test moves.
#include "server/nodes/controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <map>

#include "proto/rpc/status_details.h"
#include "server/metrics/service_metrics.h"
#include "server/nodes/names.h"

namespace mbridge::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// An agent that does at once what it is told, and remembers it.
class FakeAgent {
 public:
  explicit FakeAgent(std::string node_id, int cores = 4) : node_id_(std::move(node_id)), cores_(cores) {}

  struct Attempt {
    v1::AttemptReport report;  // phase, rank_ends; records waits for the acknowledgement.
    std::vector<v1::RankRecord> spool;
    uint64_t acknowledged = 0;
    v1::DesiredState desired = v1::DESIRED_STATE_UNSPECIFIED;
    std::vector<v1::RankSpec> specs;
  };

  Controller::SyncAnswer Sync(Controller& controller) {
    v1::SyncRequest request;
    request.set_node_id(node_id_);
    request.mutable_inventory()->set_cpu_cores(cores_);
    request.mutable_inventory()->set_hostname(node_id_);
    for (int i = 0; i < gpus; ++i) request.mutable_inventory()->add_gpus()->set_uuid(node_id_ + "-gpu-" + std::to_string(i));
    for (auto& [key, attempt] : attempts) {
      v1::AttemptReport report = attempt.report;
      for (const auto& record : attempt.spool) {
        if (record.sequence() > attempt.acknowledged) *report.add_records() = record;
      }
      report.set_drained(report.phase() == v1::ATTEMPT_PHASE_ENDED);
      *request.add_attempts() = report;
    }
    for (const auto& result : results) *request.add_results() = result;
    last_request = request;
    auto answer = controller.Sync(request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    for (const auto& order : answer->response.orders()) Obey(order);
    for (const auto& id : answer->response.acknowledged_results())
      std::erase_if(results, [&](const auto& r) { return r.task_id() == id; });
    tasks.assign(answer->response.tasks().begin(), answer->response.tasks().end());
    return std::move(answer).value();
  }

  void Obey(const v1::AttemptOrder& order) {
    const auto key = std::make_pair(order.job_id(), order.attempt());
    if (order.desired() == v1::DESIRED_STATE_RUN && !attempts.contains(key)) {
      Attempt& attempt = attempts[key];
      attempt.report.set_job_id(order.job_id());
      attempt.report.set_attempt(order.attempt());
      attempt.report.set_phase(v1::ATTEMPT_PHASE_RUNNING);
      attempt.specs.assign(order.ranks().begin(), order.ranks().end());
      ++started;
    }
    const auto found = attempts.find(key);
    if (found == attempts.end()) return;
    found->second.desired = order.desired();
    found->second.acknowledged = order.acknowledged_records();
    if (order.desired() == v1::DESIRED_STATE_FORGET) attempts.erase(found);
  }

  // The newest attempt of the job.
  Attempt& Newest(const std::string& job_id) {
    auto after = attempts.upper_bound({job_id, 1 << 30});
    EXPECT_TRUE(after != attempts.begin());
    return std::prev(after)->second;
  }
  v1::RankRecord& Record(const std::string& job_id) {
    Attempt& attempt = Newest(job_id);
    attempt.spool.emplace_back().set_sequence(attempt.spool.size());
    return attempt.spool.back();
  }
  void Started(const std::string& job_id) { Record(job_id).mutable_started()->set_first_step(0); }
  void Point(const std::string& job_id, int64_t step) {
    v1::MetricPoint* point = Record(job_id).mutable_metric();
    point->set_kind(v1::METRIC_KIND_TRAIN);
    point->set_step(step);
  }
  void Saved(const std::string& job_id, int64_t step) {
    Attempt& attempt = Newest(job_id);
    const std::string path = attempt.specs.at(0).checkpoint_directory() + "/step_" + std::to_string(step) +
                             (attempt.report.attempt() > 1 ? "." + std::to_string(attempt.report.attempt()) : "");
    v1::Checkpoint* checkpoint = Record(job_id).mutable_checkpoint();
    checkpoint->set_step(step);
    checkpoint->set_path(path);
    checkpoint->set_manifest_hash("hash" + std::to_string(step));
  }
  void End(const std::string& job_id, v1::Reason reason, int signal = 0, int rank = 0) {
    Attempt& attempt = Newest(job_id);
    v1::RankEnd* end = attempt.report.add_rank_ends();
    end->set_rank(rank);
    end->set_reason(reason);
    end->set_signal(signal);
    end->set_exit_code(reason == v1::REASON_COMPLETED ? 0 : 1);
    if (attempt.report.rank_ends_size() == static_cast<int>(attempt.specs.size()))
      attempt.report.set_phase(v1::ATTEMPT_PHASE_ENDED);
  }

  std::map<std::pair<std::string, int32_t>, Attempt> attempts;
  std::vector<v1::TaskResult> results;
  std::vector<v1::NodeTask> tasks;
  v1::SyncRequest last_request;
  int started = 0;
  int gpus = 0;

 private:
  const std::string node_id_;
  const int cores_;
};

class ControllerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::temp_directory_path() / ("mb_controller." + std::to_string(getpid()));
    std::filesystem::remove_all(directory_);
    Restart();
  }
  void TearDown() override {
    controller_.reset();
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  // As after kill -9: nothing but the store survives.
  void Restart() {
    controller_.reset();
    store_.reset();
    store_ = std::move(*Store::Open({.directory = directory_ + "/store", .on_write = nullptr}));
    Controller::Options options;
    options.log_directory = directory_ + "/logs";
    options.instance_id = NewId("c-");
    options.clock.now = [this] { return now_; };
    controller_ = std::move(*Controller::Create(options, store_.get(), &metrics_));
  }
  std::string Submit(const std::string& run_name = "", int ranks = 1, const std::function<void(v1::Job&)>& change = nullptr) {
    v1::Job job;
    job.set_job_id(NewJobId(std::chrono::system_clock::now() + milliseconds(++submitted_)));
    job.set_run_name(run_name.empty() ? NewRunName() : run_name);
    job.set_run_directory(directory_ + "/runs/" + job.run_name());
    job.mutable_resolved()->set_ranks(ranks);
    if (change) change(job);
    auto added = controller_->AddJob(job, std::nullopt);
    EXPECT_TRUE(added.ok()) << added.status();
    return job.job_id();
  }
  void Pass(milliseconds time) {
    // In small steps, as the ticking thread does.
    for (milliseconds step{0}; step < time; step += milliseconds(500)) {
      now_ += std::min(time - step, milliseconds(500));
      controller_->Tick();
    }
  }
  v1::Job Get(const std::string& job_id) { return controller_->GetJob(job_id).value_or(v1::Job()); }
  v1::JobState State(const std::string& job_id) { return Get(job_id).state(); }
  std::vector<int64_t> Sequences(const std::string& job_id) {
    std::vector<int64_t> sequences;
    const auto events = store_->ListEvents(job_id, 0, 1000);
    for (const auto& event : *events) sequences.push_back(event.sequence());
    return sequences;
  }
  // A job with its attempt running and reported.
  std::string Running(int ranks = 1) {
    agent_.Sync(*controller_);
    std::string job = Submit("", ranks);
    agent_.Sync(*controller_);
    agent_.Started(job);
    agent_.Sync(*controller_);
    EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
    return job;
  }

  std::string directory_;
  Monotonic now_ = std::chrono::steady_clock::now();
  ServiceMetrics metrics_{"test", "test"};
  std::unique_ptr<Store> store_;
  std::unique_ptr<Controller> controller_;
  FakeAgent agent_{"node-a"};
  int submitted_ = 0;
};

TEST_F(ControllerTest, RanksLearnHowManyGpusTakeJobs) {
  FakeAgent other("node-b");
  agent_.gpus = 2;
  other.gpus = 3;
  const auto on_gpu = [](v1::Job& job) { job.mutable_spec()->set_device(v1::DEVICE_CUDA); };
  other.Sync(*controller_);
  agent_.Sync(*controller_);
  EXPECT_EQ(controller_->Gpus(), 5);
  ASSERT_TRUE(controller_->DrainNode("node-b", true, "").ok());
  EXPECT_EQ(controller_->Gpus(), 2);
  const std::string job = Submit("", 2, on_gpu);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).specs.at(0).gpus(), 2);
}

TEST_F(ControllerTest, AJobRunsToItsEnd) {
  const std::string job = Submit();
  controller_->Tick();
  EXPECT_EQ(Get(job).reason(), v1::REASON_WAITING_FOR_NODE);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_STARTING);
  ASSERT_EQ(agent_.started, 1);
  const v1::RankSpec spec = agent_.Newest(job).specs.at(0);
  EXPECT_EQ(spec.threads(), 4);
  EXPECT_EQ(spec.world_size(), 1);
  EXPECT_EQ(spec.load_checkpoint_path(), "");
  agent_.Started(job);
  agent_.Point(job, 1);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
  EXPECT_THAT(metrics_.Text(), HasSubstr("mb_train_step{job=\"" + job + "\"} 1"));
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_COMPLETED);
  EXPECT_TRUE(agent_.attempts.empty()) << "forgotten";
  EXPECT_THAT(metrics_.Text(), ::testing::Not(HasSubstr("mb_train_step{job=")));
  const auto sequences = Sequences(job);
  for (size_t i = 0; i < sequences.size(); ++i) EXPECT_EQ(sequences[i], static_cast<int64_t>(i + 1));
  EXPECT_EQ(Get(job).event_sequence(), static_cast<int64_t>(sequences.size()));
}

TEST_F(ControllerTest, MessagesBeforeTheStartDoNotHideItsStep) {
  agent_.Sync(*controller_);
  const std::string job = Submit();
  agent_.Sync(*controller_);
  agent_.Record(job).set_message("memory of rank 0");
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_STARTING);
  agent_.Record(job).mutable_started()->set_first_step(5);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Get(job).attempts(0).first_step(), 5);
}

TEST_F(ControllerTest, ADeathWithinASecondIsNoSuccess) {
  agent_.Sync(*controller_);
  const std::string job = Submit();
  agent_.Sync(*controller_);
  agent_.Newest(job).report.add_rank_ends();  // Exit code 0, no reason.
  agent_.Newest(job).report.set_phase(v1::ATTEMPT_PHASE_ENDED);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_RANK_EXITED_WITHOUT_REASON);
}

TEST_F(ControllerTest, RepeatedReportsChangeNothing) {
  const std::string job = Running();
  agent_.Point(job, 1);
  agent_.Saved(job, 1);
  for (int i = 0; i < 3; ++i) {
    agent_.Newest(job).acknowledged = 0;  // An agent that lost the answer.
    agent_.Sync(*controller_);
  }
  EXPECT_EQ(store_->ListMetrics(job, 0, false, "", 10)->points.size(), 1u);
  EXPECT_EQ(store_->ListCheckpoints("")->size(), 1u);
  EXPECT_EQ(Sequences(job).size(), 4u) << "queued, starting, running, checkpoint";
}

TEST_F(ControllerTest, AGapInTheRecordsIsNotAcknowledged) {
  const std::string job = Running();
  agent_.Point(job, 1);
  agent_.Point(job, 2);
  const auto second = agent_.Newest(job).spool[1];
  agent_.Newest(job).spool.erase(agent_.Newest(job).spool.begin() + 1);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).acknowledged, 1u);
  agent_.Newest(job).spool.insert(agent_.Newest(job).spool.begin() + 1, second);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).acknowledged, 3u);
}

TEST_F(ControllerTest, ACrashRestartsFromTheLastCommittedCheckpoint) {
  const std::string job = Running();
  agent_.Point(job, 2);
  agent_.Saved(job, 2);
  agent_.Point(job, 3);
  agent_.End(job, v1::REASON_UNSPECIFIED, SIGKILL);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_WAITING_FOR_RETRY);
  EXPECT_EQ(Get(job).attempts(0).last_step(), 3);
  Pass(seconds(2));
  agent_.Sync(*controller_);
  ASSERT_EQ(agent_.started, 2);
  const v1::RankSpec spec = agent_.Newest(job).specs.at(0);
  EXPECT_EQ(spec.attempt(), 2);
  EXPECT_THAT(spec.load_checkpoint_path(), HasSubstr("step_2"));
  EXPECT_EQ(spec.expected_manifest_hash(), "hash2");
  EXPECT_EQ(Get(job).attempts(1).from_checkpoint_id(), Get(job).run_name() + "@2");
  EXPECT_EQ(Get(job).restarts(), 1);
}

TEST_F(ControllerTest, RestartsAreUsedUp) {
  std::string job = Running();
  for (int i = 0; i < 4; ++i) {
    agent_.End(job, v1::REASON_UNSPECIFIED, SIGSEGV);
    agent_.Sync(*controller_);
    for (int second = 0; second < 10; ++second) {
      Pass(seconds(1));
      agent_.Sync(*controller_);
    }
  }
  EXPECT_EQ(agent_.started, 4);
  EXPECT_EQ(State(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_TOO_MANY_RESTARTS);
}

TEST_F(ControllerTest, ATerminalStateIsNeverOverwritten) {
  const std::string job = Running();
  const FakeAgent::Attempt old = agent_.Newest(job);
  agent_.End(job, v1::REASON_NAN_LOSS);
  agent_.Sync(*controller_);
  ASSERT_EQ(State(job), v1::JOB_STATE_FAILED);
  const int64_t sequence = Get(job).event_sequence();
  // The same attempt again, alive, with more to tell: kept, and killed.
  agent_.attempts[{job, 1}] = old;
  agent_.Point(job, 9);
  agent_.Saved(job, 9);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_KILL);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_TRUE(agent_.attempts.empty());
  EXPECT_EQ(State(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_NAN_LOSS);
  EXPECT_EQ(Get(job).event_sequence(), sequence);
  EXPECT_EQ(store_->ListCheckpoints("")->size(), 1u) << "a durable checkpoint is worth keeping";
  EXPECT_EQ(controller_->StopJob(job, false, v1::REASON_CANCELLED_BY_USER).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(ControllerTest, AnOlderAttemptIsFencedOff) {
  const std::string job = Running();
  FakeAgent::Attempt old = agent_.Newest(job);
  agent_.attempts.clear();  // The agent lost it: the attempt is over.
  agent_.Sync(*controller_);
  EXPECT_EQ(Get(job).attempts(0).reason(), v1::REASON_NODE_LOST);
  Pass(seconds(2));
  agent_.Sync(*controller_);
  ASSERT_EQ(agent_.started, 2);
  agent_.attempts[{job, 1}] = old;
  agent_.Sync(*controller_);
  EXPECT_EQ((agent_.attempts[{job, 1}].desired), v1::DESIRED_STATE_KILL);
  EXPECT_EQ((agent_.attempts[{job, 2}].desired), v1::DESIRED_STATE_RUN);
}

TEST_F(ControllerTest, ARestartedCoordinatorAdoptsRunningAttempts) {
  const std::string job = Running();
  agent_.Point(job, 1);
  agent_.Sync(*controller_);
  Restart();
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
  Pass(seconds(250));
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING) << "nothing is dead before the lost time";
  agent_.Point(job, 2);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.started, 1);
  EXPECT_EQ(agent_.Newest(job).acknowledged, 3u);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(store_->ListMetrics(job, 0, false, "", 10)->points.size(), 2u);
}

TEST_F(ControllerTest, AJobThatWasBeingStartedIsStartedOnce) {
  agent_.Sync(*controller_);
  const std::string job = Submit();
  controller_->Tick();
  ASSERT_EQ(State(job), v1::JOB_STATE_STARTING);
  Restart();
  agent_.Sync(*controller_);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.started, 1);
  EXPECT_EQ(Get(job).attempts_size(), 1);
}

TEST_F(ControllerTest, SilentNodesBecomeUnreachableThenLost) {
  const std::string job = Running();
  Pass(seconds(11));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::NODE_STATE_UNREACHABLE);
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
  Pass(seconds(295));
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::NODE_STATE_LOST);
  EXPECT_EQ(Get(job).attempts(0).reason(), v1::REASON_NODE_LOST);
  EXPECT_EQ(State(job), v1::JOB_STATE_QUEUED);
}

TEST_F(ControllerTest, ACoordinatorThatSleptBlamesNobody) {
  const std::string job = Running();
  now_ += seconds(1000);
  controller_->Tick();
  EXPECT_EQ(controller_->ListNodes()[0].state(), v1::NODE_STATE_READY);
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
}

TEST_F(ControllerTest, CancelIsGracefulThenKills) {
  const std::string job = Running();
  ASSERT_TRUE(controller_->StopJob(job, false, v1::REASON_CANCELLED_BY_USER).ok());
  ASSERT_TRUE(controller_->StopJob(job, false, v1::REASON_CANCELLED_BY_USER).ok()) << "idempotent";
  EXPECT_EQ(State(job), v1::JOB_STATE_STOPPING);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_STOP);
  Pass(seconds(121));
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_KILL);
  agent_.End(job, v1::REASON_UNSPECIFIED, SIGKILL);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_CANCELLED_BY_USER);
}

TEST_F(ControllerTest, AJobThatFinishesBeforeTheStopSucceeds) {
  const std::string job = Running();
  ASSERT_TRUE(controller_->StopJob(job, true, v1::REASON_KILLED_BY_USER).ok());
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(ControllerTest, CancelledWhileQueuedOrBeforeTheAgentStartedIt) {
  const std::string queued = Submit();
  EXPECT_EQ(controller_->StopJob(queued, false, v1::REASON_CANCELLED_BY_USER)->state(), v1::JOB_STATE_CANCELLED);
  agent_.Sync(*controller_);
  const std::string placed = Submit();
  controller_->Tick();
  ASSERT_EQ(State(placed), v1::JOB_STATE_STARTING);
  ASSERT_TRUE(controller_->StopJob(placed, false, v1::REASON_CANCELLED_BY_USER).ok());
  agent_.Sync(*controller_);
  EXPECT_EQ(State(placed), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(agent_.started, 0);
}

TEST_F(ControllerTest, OneBadEndEndsTheAttempt) {
  const std::string job = Running(2);
  agent_.End(job, v1::REASON_PEER_LOST, 0, 0);
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_RUN) << "the cause may still come";
  Pass(seconds(9));
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_RUN);
  Pass(seconds(2));
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.Newest(job).desired, v1::DESIRED_STATE_KILL);
  agent_.End(job, v1::REASON_UNSPECIFIED, SIGKILL, 1);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Get(job).attempts(0).reason(), v1::REASON_RANK_CRASHED) << "a peer is never the named cause";
}

TEST_F(ControllerTest, TheWallTimeLimitEndsAJob) {
  agent_.Sync(*controller_);
  const std::string job = Submit("", 1, [](v1::Job& j) { j.mutable_spec()->set_wall_time_limit_seconds(60); });
  agent_.Sync(*controller_);
  agent_.Started(job);
  agent_.Sync(*controller_);
  for (int i = 0; i < 12; ++i) {
    Pass(seconds(5));
    agent_.Sync(*controller_);
  }
  EXPECT_EQ(State(job), v1::JOB_STATE_STOPPING);
  agent_.End(job, v1::REASON_CANCELLED_BY_USER);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Get(job).reason(), v1::REASON_WALL_TIME_EXCEEDED);
}

TEST_F(ControllerTest, RetentionComesAfterTheCommitAndKeepsPins) {
  agent_.Sync(*controller_);
  const std::string job =
      Submit("run", 1, [](v1::Job& j) { j.mutable_resolved()->mutable_config()->mutable_checkpoint()->set_most_recent_k(2); });
  agent_.Sync(*controller_);
  agent_.Started(job);
  agent_.Saved(job, 1);
  agent_.Saved(job, 2);
  agent_.Sync(*controller_);
  ASSERT_TRUE(controller_->PinCheckpoint("run@1", true, "").ok());
  EXPECT_EQ(ReasonOf(controller_->PinCheckpoint("run@1", false, "bad").status()), v1::REASON_ETAG_MISMATCH);
  EXPECT_TRUE(agent_.tasks.empty());
  agent_.Saved(job, 3);
  agent_.Saved(job, 4);
  agent_.Sync(*controller_);
  EXPECT_EQ(store_->GetCheckpoint("run@1")->state(), v1::CHECKPOINT_STATE_COMMITTED) << "pinned";
  EXPECT_EQ(store_->GetCheckpoint("run@2")->state(), v1::CHECKPOINT_STATE_DELETING);
  EXPECT_EQ(store_->GetCheckpoint("run@3")->state(), v1::CHECKPOINT_STATE_COMMITTED);
  Restart();  // The work survives.
  agent_.Sync(*controller_);
  ASSERT_EQ(agent_.tasks.size(), 1u);
  EXPECT_THAT(agent_.tasks[0].delete_().path(), HasSubstr("step_2"));
  v1::TaskResult result;
  result.set_task_id(agent_.tasks[0].task_id());
  result.set_ok(true);
  agent_.results.push_back(result);
  agent_.Sync(*controller_);
  EXPECT_EQ(store_->GetCheckpoint("run@2")->state(), v1::CHECKPOINT_STATE_DELETED);
  EXPECT_TRUE(agent_.tasks.empty());
  EXPECT_TRUE(store_->ListOutbox()->empty());
}

TEST_F(ControllerTest, StartModesAreExplicit) {
  agent_.Sync(*controller_);
  const std::string job = Submit("run");
  EXPECT_EQ(ReasonOf(controller_->CheckStart({}, "run").status()), v1::REASON_RUN_IN_USE);
  agent_.Sync(*controller_);
  agent_.Started(job);
  agent_.Saved(job, 5);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  const auto start = [](v1::StartMode mode, const std::string& id = "") {
    v1::StartSpec spec;
    spec.set_mode(mode);
    spec.set_checkpoint_id(id);
    return spec;
  };
  const auto fresh = controller_->CheckStart({}, "run").status();
  EXPECT_EQ(ReasonOf(fresh), v1::REASON_RUN_HAS_CHECKPOINTS);
  EXPECT_THAT(std::string(fresh.message()), HasSubstr("run@5"));
  EXPECT_THAT(std::string(fresh.message()), HasSubstr("mbctl resume " + job));
  EXPECT_THAT(std::string(fresh.message()), HasSubstr("--start fork --from run@5"));
  EXPECT_EQ(controller_->CheckStart(start(v1::START_MODE_RESUME), "run")->checkpoint_id, "run@5");
  EXPECT_EQ(controller_->CheckStart(start(v1::START_MODE_FORK, "run@5"), "other")->checkpoint_id, "run@5");
  EXPECT_EQ(controller_->CheckStart({}, "other")->checkpoint_id, "");
  EXPECT_EQ(ReasonOf(controller_->CheckStart(start(v1::START_MODE_RESUME), "other").status()), v1::REASON_CHECKPOINT_NOT_FOUND);
  EXPECT_EQ(ReasonOf(controller_->CheckStart(start(v1::START_MODE_RESUME, "run@6"), "run").status()),
            v1::REASON_CHECKPOINT_NOT_FOUND);
  EXPECT_FALSE(controller_->CheckStart(start(v1::START_MODE_RESUME, "run@5"), "other").ok());

  v1::TaskResult bad;
  bad.set_reason(v1::REASON_CHECKPOINT_CORRUPT);
  bad.set_detail("tensor x of shard 0");
  ASSERT_TRUE(controller_->RecordVerification("run@5", bad).ok());
  EXPECT_EQ(ReasonOf(controller_->CheckStart(start(v1::START_MODE_RESUME, "run@5"), "run").status()),
            v1::REASON_CHECKPOINT_CORRUPT);
}

TEST_F(ControllerTest, ACorruptNewestCheckpointIsLeftOutAndNamed) {
  agent_.Sync(*controller_);
  const std::string job = Submit("run");
  agent_.Sync(*controller_);
  agent_.Started(job);
  for (const int step : {2, 4, 6}) agent_.Saved(job, step);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  v1::StartSpec resume;
  resume.set_mode(v1::START_MODE_RESUME);
  EXPECT_FALSE(controller_->CheckStart(resume, "run")->corrupt.has_value());
  controller_->RecordCorruption("run@2", "older");
  EXPECT_FALSE(controller_->CheckStart(resume, "run")->corrupt.has_value()) << "nothing newer is left out";
  controller_->RecordCorruption("run@6", "tensor x of shard 0");
  const auto start = controller_->CheckStart(resume, "run");
  EXPECT_EQ(start->checkpoint_id, "run@4");
  ASSERT_TRUE(start->corrupt.has_value());
  EXPECT_EQ(start->corrupt->checkpoint_id(), "run@6");
  EXPECT_EQ(start->corrupt->detail(), "tensor x of shard 0");
  resume.set_checkpoint_id("run@4");
  EXPECT_FALSE(controller_->CheckStart(resume, "run")->corrupt.has_value()) << "chosen by the user";
}

TEST_F(ControllerTest, TheLastCheckpointOfARunNeedsForce) {
  agent_.Sync(*controller_);
  const std::string job = Submit("run");
  agent_.Sync(*controller_);
  agent_.Started(job);
  agent_.Saved(job, 1);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_EQ(ReasonOf(controller_->DeleteCheckpoint("run@1", false).status()), v1::REASON_CHECKPOINT_IN_USE);
  const std::string fork = Submit("other", 1, [](v1::Job& j) {
    j.mutable_spec()->mutable_start()->set_mode(v1::START_MODE_FORK);
    j.mutable_spec()->mutable_start()->set_checkpoint_id("run@1");
  });
  EXPECT_THAT(std::string(controller_->DeleteCheckpoint("run@1", true).status().message()), HasSubstr(fork));
  ASSERT_TRUE(controller_->StopJob(fork, true, v1::REASON_KILLED_BY_USER).ok());
  agent_.Sync(*controller_);
  EXPECT_EQ(controller_->DeleteCheckpoint("run@1", true)->state(), v1::CHECKPOINT_STATE_DELETING);
}

TEST_F(ControllerTest, TasksAreAnsweredOnceOrTimeOut) {
  agent_.Sync(*controller_);
  std::vector<std::string> outcomes;
  const auto run = [&](const std::string& id, const std::string& node) {
    v1::NodeTask task;
    task.set_task_id(id);
    task.mutable_shutdown();
    controller_->RunTask(node, task, seconds(20), [&, id](const absl::StatusOr<v1::TaskResult>& result) {
      outcomes.push_back(id + (result.ok() ? " ok" : " " + std::to_string(static_cast<int>(result.status().code()))));
    });
  };
  run("a", "node-a");
  run("b", "node-a");
  run("c", "nowhere");
  EXPECT_THAT(outcomes, ElementsAre("c 14"));
  agent_.Sync(*controller_);
  EXPECT_EQ(agent_.tasks.size(), 2u);
  v1::TaskResult result;
  result.set_task_id("a");
  agent_.results = {result, result};
  agent_.Sync(*controller_);
  EXPECT_THAT(outcomes, ElementsAre("c 14", "a ok"));
  for (int i = 0; i < 5; ++i) {
    Pass(seconds(5));
    agent_.Sync(*controller_);
  }
  EXPECT_THAT(outcomes, ElementsAre("c 14", "a ok", "b 4"));
}

TEST_F(ControllerTest, ADrainedNodeFinishesItsJobsAndTakesNoMore) {
  const std::string job = Running();
  ASSERT_TRUE(controller_->DrainNode("node-a", true, "repair").ok());
  EXPECT_EQ(ReasonOf(controller_->DrainNode("nowhere", true, "").status()), v1::REASON_NODE_NOT_FOUND);
  agent_.End(job, v1::REASON_COMPLETED);
  agent_.Sync(*controller_);
  EXPECT_EQ(State(job), v1::JOB_STATE_SUCCEEDED);
  const std::string next = Submit();
  Restart();
  agent_.Sync(*controller_);
  EXPECT_EQ(State(next), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(Get(next).detail(), HasSubstr("drained"));
  ASSERT_TRUE(controller_->DrainNode("node-a", false, "").ok());
  controller_->Tick();
  EXPECT_EQ(State(next), v1::JOB_STATE_STARTING);
}

TEST_F(ControllerTest, ASyncWithoutNewsMayWait) {
  agent_.Sync(*controller_);
  v1::SyncRequest request = agent_.last_request;
  request.set_seen_version(controller_->Sync(request)->response.version());
  EXPECT_TRUE(controller_->Sync(request)->may_wait);
  Submit();
  controller_->Tick();
  EXPECT_FALSE(controller_->Sync(request)->may_wait);
  EXPECT_NE(controller_->Orders("node-a").version(), request.seen_version());
}

}  // namespace
}  // namespace mbridge::server
