// Checkpoints and explicit starts: fresh, resume, fork; damage, full disk, retention.
#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }

  // A finished job under the run name; its id.
  std::string Train(const std::string& run_name, int iterations, Arguments more = {}) {
    more.insert(more.end(), {"--name", run_name});
    const std::string id = service_.Submit(TinyJob(iterations, more));
    const v1::Job job = service_.WaitForEnd(id);
    EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
    return id;
  }

  // Largest file under the checkpoint's directory: a tensor shard.
  static std::filesystem::path LargestFile(const std::filesystem::path& directory) {
    std::filesystem::path largest;
    uintmax_t size = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      if (entry.is_regular_file() && entry.file_size() >= size) {
        size = entry.file_size();
        largest = entry.path();
      }
    }
    return largest;
  }

  static void FlipBit(const std::filesystem::path& path) {
    std::string content = ReadFile(path);
    ASSERT_FALSE(content.empty()) << path;
    content[content.size() / 2] ^= 0x10;
    WriteFile(path, content);
  }

  Service service_;
};

TEST_F(CheckpointTest, FreshIsRefusedWhereTheRunHasCheckpoints) {
  Train("kept", 6, {"checkpoint.save_interval=3"});
  EXPECT_THAT(service_.Checkpoints("kept"), SizeIs(2));
  Arguments arguments = {"submit"};
  for (const std::string& argument : TinyJob(6, {"--name", "kept", "checkpoint.save_interval=3"})) arguments.push_back(argument);
  const CommandResult result = service_.Mbctl(arguments);
  EXPECT_THAT(result, Exited(8));
  EXPECT_THAT(result.err, AllOf(HasSubstr("kept@3"), HasSubstr("kept@6"), HasSubstr("resume"), HasSubstr("fork")));
}

// Learning rate, Adam's moments and step, dropout streams, sample order, validation set: all must go on where they stopped.
TEST_F(CheckpointTest, ResumeIsBitExact) {
  const std::string straight = Train("straight", 10, {"checkpoint.save_interval=5"});
  const std::string first = Train("halves", 10, {"checkpoint.save_interval=5", "train.exit_interval=5"});
  const auto first_points = service_.TrainPoints(first);
  ASSERT_TRUE(CompleteSeries(first_points, 5));

  const CommandResult resumed = service_.Mbctl({"resume", first, "-o", "name"});
  ASSERT_THAT(resumed, Exited(0));
  const std::string second = resumed.out.substr(0, resumed.out.find('\n'));
  const v1::Job job = service_.WaitForEnd(second);
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.run_name(), "halves");
  EXPECT_EQ(job.attempts(0).from_checkpoint_id(), "halves@5");
  EXPECT_EQ(job.attempts(0).first_step(), 5);

  auto joined = first_points;
  for (const auto& point : service_.TrainPoints(second)) joined.push_back(point);
  EXPECT_TRUE(SameLosses(service_.TrainPoints(straight), joined));
  const auto validation_a = service_.Points(straight, v1::METRIC_KIND_VALIDATION);
  const auto validation_b = service_.Points(second, v1::METRIC_KIND_VALIDATION);
  ASSERT_THAT(validation_a, testing::Not(IsEmpty()));
  ASSERT_THAT(validation_b, testing::Not(IsEmpty()));
  EXPECT_EQ(validation_a.back().lm_loss(), validation_b.back().lm_loss()) << "another validation set after resume";
}

TEST_F(CheckpointTest, ResumeIsBitExactOnTwoRanks) {
  const Arguments more = {"checkpoint.save_interval=3", "--ranks", "2"};
  const std::string straight = Train("straight", 6, more);
  Arguments half = more;
  half.push_back("train.exit_interval=3");
  const std::string first = Train("halves", 6, half);
  const CommandResult resumed = service_.Mbctl({"resume", first, "-o", "name"});
  ASSERT_THAT(resumed, Exited(0));
  const std::string second = resumed.out.substr(0, resumed.out.find('\n'));
  ASSERT_EQ(service_.WaitForEnd(second).state(), v1::JOB_STATE_SUCCEEDED);
  auto joined = service_.TrainPoints(first);
  for (const auto& point : service_.TrainPoints(second)) joined.push_back(point);
  EXPECT_TRUE(SameLosses(service_.TrainPoints(straight), joined));
}

TEST_F(CheckpointTest, ForkStartsANewRun) {
  const std::string parent = Train("parent", 6, {"checkpoint.save_interval=3"});
  const CommandResult forked = service_.Mbctl({"fork", "parent@3", "-o", "name", "--name", "child"});
  ASSERT_THAT(forked, Exited(0));
  const std::string child = forked.out.substr(0, forked.out.find('\n'));
  const v1::Job job = service_.WaitForEnd(child);
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.run_name(), "child");
  EXPECT_EQ(job.attempts(0).from_checkpoint_id(), "parent@3");
  // The same configuration goes on as the parent did.
  auto expected = service_.TrainPoints(parent);
  expected.erase(expected.begin(), expected.begin() + 3);
  EXPECT_TRUE(SameLosses(expected, service_.TrainPoints(child)));
  for (const v1::Checkpoint& checkpoint : service_.Checkpoints("child")) {
    EXPECT_EQ(checkpoint.parent_checkpoint_id(), "parent@3");
  }
}

TEST_F(CheckpointTest, ForkWithWeightsOnlyStartsTheScheduleAnew) {
  Train("parent", 6, {"checkpoint.save_interval=3"});
  const CommandResult forked = service_.Mbctl({"fork", "parent@6", "-o", "name", "--weights-only"});
  ASSERT_THAT(forked, Exited(0));
  const std::string child = forked.out.substr(0, forked.out.find('\n'));
  ASSERT_EQ(service_.WaitForEnd(child).state(), v1::JOB_STATE_SUCCEEDED);
  const auto points = service_.TrainPoints(child);
  ASSERT_TRUE(CompleteSeries(points, 6));
  EXPECT_EQ(points.front().consumed_samples(), 4);
}

TEST_F(CheckpointTest, CorruptShardIsNamedRefusedAndTheEarlierOneOffered) {
  const std::string id = Train("damaged", 6, {"checkpoint.save_interval=3"});
  const auto checkpoints = service_.Checkpoints("damaged");
  ASSERT_THAT(checkpoints, SizeIs(2));
  std::filesystem::path shard;
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    if (checkpoint.step() == 6) shard = LargestFile(checkpoint.path());
  }
  ASSERT_FALSE(shard.empty());
  FlipBit(shard);

  const CommandResult verified = service_.Mbctl({"ckpt", "verify", "damaged@6"});
  EXPECT_THAT(verified, Exited(9));
  EXPECT_THAT(verified.out + verified.err, HasSubstr(shard.filename().string()));
  const CommandResult resumed =
      service_.Mbctl({"resume", id, "--from", "damaged@6", "--wait", "train.train_iters=9", "scheduler.lr_decay_iters=9"});
  EXPECT_NE(resumed.exit_code, 0);
  EXPECT_THAT(resumed.out + resumed.err, HasSubstr("damaged@3"));
  EXPECT_THAT(service_.Mbctl({"ckpt", "verify", "damaged@3"}), Exited(0));
}

// The damage is not known before the rank reads it.
TEST_F(CheckpointTest, CorruptShardFoundByTheRankFailsTheResume) {
  const std::string id = Train("damaged", 6, {"checkpoint.save_interval=3"});
  for (const v1::Checkpoint& checkpoint : service_.Checkpoints("damaged")) {
    if (checkpoint.step() == 6) FlipBit(LargestFile(checkpoint.path()));
  }
  const CommandResult resumed = service_.Mbctl({"resume", id, "--wait", "train.train_iters=9", "scheduler.lr_decay_iters=9"});
  EXPECT_THAT(resumed, Exited(9));
  EXPECT_THAT(resumed.out + resumed.err, AllOf(HasSubstr("CHECKPOINT_CORRUPT"), HasSubstr("damaged@3")));
}

// A whole copy with the highest number lies in the run's folder, but the store does not know it.
TEST_F(CheckpointTest, AFolderThatTheStoreDoesNotKnowIsNotResumed) {
  const std::string id = Train("own", 6, {"checkpoint.save_interval=3"});
  const auto checkpoints = service_.Checkpoints("own");
  ASSERT_THAT(checkpoints, SizeIs(2));
  const std::filesystem::path newest = checkpoints[0].path();
  std::filesystem::copy(newest, newest.parent_path() / "step_99999999", std::filesystem::copy_options::recursive);
  EXPECT_THAT(service_.Checkpoints("own"), SizeIs(2));
  const CommandResult resumed = service_.Mbctl({"resume", id, "-o", "name", "train.train_iters=9", "scheduler.lr_decay_iters=9"});
  ASSERT_THAT(resumed, Exited(0));
  const v1::Job job = service_.WaitForEnd(resumed.out.substr(0, resumed.out.find('\n')));
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.attempts(0).from_checkpoint_id(), "own@6");
  EXPECT_EQ(job.attempts(0).first_step(), 6);
}

TEST_F(CheckpointTest, FullDiskWhileSavingKeepsTheEarlierOne) {
  Service full(Service::Options{.environment = {{"MB_FAILPOINTS", "file.write=error:28@200"}}});
  ASSERT_TRUE(full.Start()) << full.log_text();
  const std::string id = full.Submit(TinyJob(40, {"--name", "full", "checkpoint.save_interval=1"}));
  const v1::Job job = full.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.reason(), v1::REASON_DISK_FULL) << job.detail();
  const auto checkpoints = full.Checkpoints("full");
  ASSERT_THAT(checkpoints, testing::Not(IsEmpty()));
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    EXPECT_THAT(full.Mbctl({"ckpt", "verify", checkpoint.checkpoint_id()}), Exited(0));
  }
}

TEST_F(CheckpointTest, KillWhileSavingLeavesNoHalfCheckpoint) {
  Service dying(Service::Options{.environment = {{"MB_FAILPOINTS", "checkpoint.before_rename=kill@2"}}});
  ASSERT_TRUE(dying.Start()) << dying.log_text();
  const std::string id = dying.Submit(TinyJob(9, {"--name", "cut", "checkpoint.save_interval=3"}));
  const v1::Job job = dying.WaitForEnd(id);
  // Attempt 1 dies in its second save, attempt 2 goes on from step 3 and dies in its second save (step 9), attempt 3 goes
  // on from step 6.
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_GE(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(1).from_checkpoint_id(), "cut@3");
  for (const v1::Checkpoint& checkpoint : dying.Checkpoints("cut")) {
    EXPECT_THAT(dying.Mbctl({"ckpt", "verify", checkpoint.checkpoint_id()}), Exited(0));
  }
  EXPECT_TRUE(CompleteSeries(dying.TrainPoints(id, true), 9));
}

TEST_F(CheckpointTest, RetentionKeepsTheNewestAndThePinned) {
  const std::string id = Train("retained", 12, {"checkpoint.save_interval=2", "checkpoint.most_recent_k=2"});
  const auto checkpoints = service_.Checkpoints("retained");
  ASSERT_THAT(checkpoints, SizeIs(2));
  for (const v1::Checkpoint& checkpoint : checkpoints) EXPECT_GE(checkpoint.step(), 10);
  ASSERT_THAT(service_.Mbctl({"ckpt", "pin", "retained@10"}), Exited(0));
  const CommandResult removed = service_.Mbctl({"ckpt", "rm", "retained@10", "--yes"});
  EXPECT_THAT(removed, Exited(8)) << "pinned";
  EXPECT_THAT(service_.Mbctl({"ckpt", "ls"}).out, AllOf(HasSubstr("retained@10"), HasSubstr("retained@12")));
}

TEST_F(CheckpointTest, GracefulCancelSavesAndResumeGoesOn) {
  // Every step of 50 ms: the run is cancelled in the middle and ends soon after it is resumed.
  Service slow(Service::Options{.environment = {{"MB_FAILPOINTS", "train.iteration=sleep:50"}}});
  ASSERT_TRUE(slow.Start()) << slow.log_text();
  const Arguments more = {"checkpoint.save_interval=60", "validation.eval_interval=2"};
  Arguments named = more;
  named.insert(named.end(), {"--name", "stopped"});
  const std::string id = slow.Submit(TinyJob(60, named));
  slow.WaitForStep(id, 3);
  ASSERT_THAT(slow.Mbctl({"cancel", id}), Exited(0));
  const v1::Job job = slow.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(job.reason(), v1::REASON_CANCELLED_BY_USER);
  const auto points = slow.TrainPoints(id);
  const auto checkpoints = slow.Checkpoints("stopped");
  ASSERT_THAT(checkpoints, SizeIs(1));
  ASSERT_THAT(points, testing::Not(IsEmpty()));
  EXPECT_EQ(checkpoints[0].step(), points.back().step());
  EXPECT_TRUE(slow.NoneLeft("mbrank"));

  const CommandResult resumed = slow.Mbctl({"resume", "stopped", "-o", "name"});
  ASSERT_THAT(resumed, Exited(0));
  const std::string second = resumed.out.substr(0, resumed.out.find('\n'));
  const std::string straight = slow.Submit(TinyJob(60, more));
  const v1::Job ended = slow.WaitForEnd(second);
  ASSERT_EQ(ended.state(), v1::JOB_STATE_SUCCEEDED) << ended.detail();
  EXPECT_EQ(ended.attempts(0).first_step(), points.back().step());
  ASSERT_EQ(slow.WaitForEnd(straight).state(), v1::JOB_STATE_SUCCEEDED);
  for (const auto kind : {v1::METRIC_KIND_TRAIN, v1::METRIC_KIND_VALIDATION}) {
    auto joined = slow.Points(id, kind);
    for (const auto& point : slow.Points(second, kind)) joined.push_back(point);
    EXPECT_TRUE(SameLosses(slow.Points(straight, kind), joined)) << "kind " << kind;
  }
}

// An evaluation of 2000 batches of 50 ms: the cancel must not wait for it.
TEST_F(CheckpointTest, CancelDoesNotWaitForALongEvaluation) {
  Service slow(Service::Options{.environment = {{"MB_FAILPOINTS", "train.evaluation=sleep:50"}}});
  ASSERT_TRUE(slow.Start()) << slow.log_text();
  const std::string id = slow.Submit(TinyJob(4, {"--name", "long", "--ranks", "2", "checkpoint.save_interval=4",
                                                 "validation.eval_interval=2", "validation.eval_iters=2000"}));
  slow.WaitForStep(id, 2);
  sleep(1);
  ASSERT_THAT(slow.Mbctl({"cancel", id}), Exited(0));
  const v1::Job job = slow.WaitForEnd(id, Seconds(20));
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED) << job.detail();
  EXPECT_EQ(job.reason(), v1::REASON_CANCELLED_BY_USER);
  const auto checkpoints = slow.Checkpoints("long");
  ASSERT_THAT(checkpoints, SizeIs(1));
  EXPECT_EQ(checkpoints[0].step(), 2);
}

// All is trained then: the resumed job evaluates, and only a run that has ended well is refused.
TEST_F(CheckpointTest, AJobStoppedInItsLastEvaluationResumesWithThat) {
  Service slow(Service::Options{.environment = {{"MB_FAILPOINTS", "train.evaluation=sleep:50"}}});
  ASSERT_TRUE(slow.Start()) << slow.log_text();
  const std::string id = slow.Submit(TinyJob(4, {"--name", "late", "validation.eval_iters=30"}));
  slow.WaitForStep(id, 4);
  ASSERT_THAT(slow.Mbctl({"cancel", id}), Exited(0));
  const v1::Job job = slow.WaitForEnd(id, Seconds(20));
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(job.detail(), HasSubstr("all are trained and saved, a resume does the evaluation that is left"));
  EXPECT_THAT(slow.Points(id, v1::METRIC_KIND_TEST), IsEmpty());

  const CommandResult resumed = slow.Mbctl({"resume", "late", "-o", "name"});
  ASSERT_THAT(resumed, Exited(0)) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("all 4 iterations are trained and saved; what is left is the evaluation after them"));
  const std::string second = resumed.out.substr(0, resumed.out.find('\n'));
  const v1::Job ended = slow.WaitForEnd(second);
  ASSERT_EQ(ended.state(), v1::JOB_STATE_SUCCEEDED) << ended.detail();
  EXPECT_EQ(ended.attempts(0).first_step(), 4);
  EXPECT_THAT(slow.TrainPoints(second), IsEmpty());
  EXPECT_THAT(slow.Points(second, v1::METRIC_KIND_VALIDATION), SizeIs(1));
  EXPECT_THAT(slow.Points(second, v1::METRIC_KIND_TEST), SizeIs(1));

  Train("whole", 4);
  const CommandResult nothing = service_.Mbctl({"resume", "whole"});
  EXPECT_THAT(nothing, Exited(2));
  EXPECT_THAT(nothing.err, AllOf(HasSubstr("train.train_iters"), HasSubstr("nothing is left to train")));
}

// The user hears that the newest one is damaged before the job starts from an older one.
TEST_F(CheckpointTest, ResumeNamesTheCorruptCheckpointThatItLeavesOut) {
  const std::string id = Train("worn", 6, {"checkpoint.save_interval=3"});
  for (const v1::Checkpoint& checkpoint : service_.Checkpoints("worn")) {
    if (checkpoint.step() == 6) FlipBit(LargestFile(checkpoint.path()));
  }
  ASSERT_THAT(service_.Mbctl({"ckpt", "verify", "worn@6"}), Exited(9));
  const CommandResult resumed = service_.Mbctl({"resume", id, "-o", "name"});
  ASSERT_THAT(resumed, Exited(0));
  EXPECT_THAT(resumed.err, AllOf(HasSubstr("worn@6 -> worn@3"), HasSubstr("worn@6 is the newest, but corrupt")));
  const std::string second = resumed.out.substr(0, resumed.out.find('\n'));
  EXPECT_EQ(service_.WaitForEnd(second).attempts(0).from_checkpoint_id(), "worn@3");
  EXPECT_THAT(service_.Mbctl({"describe", second}).out, HasSubstr("worn@6 -> worn@3"));
}

TEST_F(CheckpointTest, KillSavesNothing) {
  const std::string id = service_.Submit(SlowJob(5000, {"--name", "killed", "checkpoint.save_interval=5000"}));
  service_.WaitForStep(id, 3);
  ASSERT_THAT(service_.Mbctl({"cancel", "--kill", id}), Exited(0));
  const v1::Job job = service_.WaitForEnd(id, Seconds(15));
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(job.reason(), v1::REASON_KILLED_BY_USER);
  EXPECT_THAT(service_.Checkpoints("killed"), IsEmpty());
  EXPECT_TRUE(service_.NoneLeft("mbrank"));
}

}  // namespace
}  // namespace mbridge::e2e
