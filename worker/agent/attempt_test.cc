// Cases that need a damaged or foreign state directory, without processes.
#include "worker/agent/attempt.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/agent/agent.h"
#include "worker/agent/checkpoint_removal.h"
#include "worker/agent/coordinator_link.h"
#include "worker/agent/inventory.h"
#include "worker/spool/file.h"

namespace mbridge::agent {
namespace {

class AttemptTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "attempt_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    boot_id_ = *spool::CurrentBootId();
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::unique_ptr<Attempt> Create(int ranks) {
    v1::AttemptOrder order;
    order.set_job_id("j-1");
    order.set_attempt(1);
    for (int r = 0; r < ranks; ++r) {
      v1::RankSpec* spec = order.add_ranks();
      spec->set_job_id("j-1");
      spec->set_attempt(1);
      spec->set_rank(r);
      spec->set_world_size(ranks);
    }
    auto attempt = Attempt::Create(path(), order, boot_id_);
    EXPECT_TRUE(attempt.ok()) << attempt.status();
    EXPECT_TRUE(absl::IsAlreadyExists(Attempt::Create(path(), order, boot_id_).status()));
    return *std::move(attempt);
  }

  v1::AttemptReport Report(Attempt* attempt) {
    v1::AttemptReport report;
    Budget budget;
    attempt->Report(&report, &budget);
    return report;
  }

  void Tick(Attempt* attempt, std::chrono::seconds after = {}) {
    attempt->Tick(start_ + after, {"/nonexistent/shim", "/nonexistent/rank", "/nonexistent/rank"}, &children_);
  }

  std::string path() const { return directory_ + "/j-1.1"; }

  std::string directory_;
  std::string boot_id_;
  Children children_;
  const TimePoint start_ = std::chrono::steady_clock::now();
};

TEST_F(AttemptTest, SpecificationsCarryTheDirectory) {
  auto attempt = Create(2);
  v1::RankSpec spec;
  ASSERT_TRUE(spool::ReadProto(attempt->files().SpecPath(1), &spec).ok());
  EXPECT_EQ(spec.attempt_directory(), path());
  EXPECT_EQ(std::filesystem::status(path()).permissions(), std::filesystem::perms::owner_all);
}

TEST_F(AttemptTest, ARankThatNeverStartedIsClaimedWhenItIsStopped) {
  Create(1);
  auto attempt = Attempt::Load(path(), boot_id_);  // The agent was killed before it started the rank.
  ASSERT_TRUE(attempt.ok());
  Tick(attempt->get());
  EXPECT_EQ((*attempt)->phase(), v1::ATTEMPT_PHASE_STARTING);  // Nobody has ordered anything yet.
  (*attempt)->SetDesired(v1::DESIRED_STATE_STOP, v1::REASON_CANCELLED_BY_USER);
  Tick(attempt->get());
  EXPECT_TRUE((*attempt)->ended());
  EXPECT_EQ(Report(attempt->get()).rank_ends(0).reason(), v1::REASON_CANCELLED_BY_USER);
  EXPECT_TRUE(std::filesystem::exists((*attempt)->files().ProcessPath(0)));
}

TEST_F(AttemptTest, AShimThatCannotBeStartedIsASpawnFailureOfAllRanks) {
  auto attempt = Create(2);
  attempt->SetDesired(v1::DESIRED_STATE_RUN, v1::REASON_UNSPECIFIED);
  Tick(attempt.get());
  Tick(attempt.get());
  ASSERT_TRUE(attempt->ended());
  const v1::AttemptReport report = Report(attempt.get());
  EXPECT_EQ(report.rank_ends(0).reason(), v1::REASON_SPAWN_FAILED);
  EXPECT_THAT(report.rank_ends(0).detail(), ::testing::HasSubstr("/nonexistent/shim"));
}

TEST_F(AttemptTest, AProcessOfAnotherBootIsALostNode) {
  auto attempt = Create(2);
  v1::ProcessRecord record;
  record.set_boot_id("before");
  record.set_shim_pid(::getpid());
  record.set_rank_pid(::getpid());
  ASSERT_TRUE(spool::WriteProto(attempt->files().ProcessPath(0), record).ok());
  attempt->SetDesired(v1::DESIRED_STATE_RUN, v1::REASON_UNSPECIFIED);
  Tick(attempt.get());
  Tick(attempt.get());
  ASSERT_TRUE(attempt->ended());
  const v1::AttemptReport report = Report(attempt.get());
  EXPECT_EQ(report.rank_ends(0).reason(), v1::REASON_NODE_LOST);
  EXPECT_EQ(report.rank_ends(1).reason(), v1::REASON_PEER_LOST);  // Not started any more.
}

TEST_F(AttemptTest, AReusedPidIsNotTakenForTheRank) {
  auto attempt = Create(1);
  v1::ProcessRecord record;
  record.set_boot_id(boot_id_);
  record.set_shim_pid(::getpid());
  record.set_shim_start_ticks(1);
  record.set_rank_pid(::getpid());
  record.set_rank_start_ticks(1);
  ASSERT_TRUE(spool::WriteProto(attempt->files().ProcessPath(0), record).ok());
  attempt->SetDesired(v1::DESIRED_STATE_KILL, v1::REASON_KILLED_BY_USER);
  Tick(attempt.get());  // Would kill this test if it did.
  ASSERT_TRUE(attempt->ended());
}

TEST_F(AttemptTest, RecordsStartAfterTheAcknowledgedOneAndStayBounded) {
  auto attempt = Create(1);
  {
    auto writer = spool::RecordWriter::Open(attempt->files().SpoolPath());
    ASSERT_TRUE(writer.ok());
    v1::RankRecord record;
    record.set_message(std::string(100'000, 'm'));
    for (int i = 0; i < 30; ++i) ASSERT_TRUE((*writer)->Append(record).ok());
  }
  EXPECT_EQ(Report(attempt.get()).records().size(), 0);  // Nobody has said yet where to go on.
  v1::AttemptOrder order;
  uint64_t expected = 5;
  for (const uint64_t acknowledged : {4, 4, 20, 7}) {
    order.set_acknowledged_records(acknowledged);
    attempt->Acknowledge(order);
    const v1::AttemptReport report = Report(attempt.get());
    expected = acknowledged + 1;
    ASSERT_GT(report.records().size(), 5);
    EXPECT_LT(report.ByteSizeLong(), 1'300'000u);
    for (const v1::RankRecord& record : report.records()) EXPECT_EQ(record.sequence(), expected++);
  }
}

TEST_F(AttemptTest, ALostRecordIsReplacedSoThatTheSequenceHasNoGap) {
  auto attempt = Create(1);
  const std::string path = attempt->files().SpoolPath();
  v1::RankRecord record;
  record.set_message("m");
  std::uintmax_t first = 0;
  {
    auto writer = spool::RecordWriter::Open(path);
    ASSERT_TRUE((*writer)->Append(record).ok());
    first = std::filesystem::file_size(path);
    for (int i = 0; i < 2; ++i) ASSERT_TRUE((*writer)->Append(record).ok());
  }
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(static_cast<std::streamoff>(first + 18)).put('\x55');
  attempt->Acknowledge(v1::AttemptOrder());
  const v1::AttemptReport report = Report(attempt.get());
  ASSERT_EQ(report.records().size(), 3);
  EXPECT_THAT(report.records(1).message(), ::testing::HasSubstr("damaged"));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(report.records(i).sequence(), static_cast<uint64_t>(i + 1));
}

TEST_F(AttemptTest, ALogThatRunsAwayLosesItsMiddleAndSaysHowMuch) {
  auto attempt = Create(1);
  { std::ofstream(attempt->files().LogPath(0)) << std::string(20'000'000, 'a') << "end"; }
  v1::AttemptOrder order;
  attempt->Acknowledge(order);
  const v1::AttemptReport report = Report(attempt.get());
  ASSERT_EQ(report.logs().size(), 1);
  const v1::LogChunk& chunk = report.logs(0);
  EXPECT_EQ(chunk.offset(), chunk.dropped_bytes());
  EXPECT_EQ(chunk.offset() + static_cast<int64_t>(chunk.data().size()), 20'000'003);
  EXPECT_TRUE(chunk.data().ends_with("end"));
}

TEST_F(AttemptTest, AnAcknowledgedLogDoesNotFillTheDisk) {
  auto attempt = Create(1);
  const std::string log = attempt->files().LogPath(0);
  const int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::pwrite(fd, std::string(1 << 20, 'a').data(), 1 << 20, 0), 1 << 20);
  ASSERT_EQ(::ftruncate(fd, int64_t{400} << 20), 0);
  struct stat before {};
  ASSERT_EQ(::fstat(fd, &before), 0);
  v1::AttemptOrder order;
  order.add_logs()->set_offset(int64_t{400} << 20);
  attempt->Acknowledge(order);
  Report(attempt.get());
  struct stat after {};
  ASSERT_EQ(::fstat(fd, &after), 0);
  EXPECT_EQ(after.st_size, before.st_size);
  EXPECT_LT(after.st_blocks, before.st_blocks);
  ::close(fd);
}

TEST_F(AttemptTest, RemovesOnlyCheckpointsAndFinishesInterruptedRemovals) {
  namespace fs = std::filesystem;
  const std::string step = directory_ + "/step_1";
  fs::create_directories(step + "/shards");
  std::ofstream(step + "/shards/a") << "12345";
  EXPECT_TRUE(absl::IsFailedPrecondition(RemoveCheckpoint(step).status()));
  std::ofstream(step + "/manifest.json") << "{}";
  fs::create_directory_symlink(step, directory_ + "/link");
  EXPECT_TRUE(absl::IsFailedPrecondition(RemoveCheckpoint(directory_ + "/link").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(RemoveCheckpoint(directory_ + "/x/../step_1").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(RemoveCheckpoint("step_1").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(RemoveCheckpoint("/tmp").status()));
  EXPECT_TRUE(fs::exists(step + "/shards/a"));
  EXPECT_EQ(*RemoveCheckpoint(step), 7);
  EXPECT_EQ(*RemoveCheckpoint(step), 0);  // Again is a success.

  fs::create_directories(directory_ + "/.trash-step_1");
  std::ofstream(directory_ + "/.trash-step_1/a") << "123";
  EXPECT_EQ(*RemoveCheckpoint(step), 3);
  EXPECT_FALSE(fs::exists(directory_ + "/.trash-step_1"));
}

TEST_F(AttemptTest, APreflightThatHangsIsEnded) {
  NodeTasks tasks(directory_ + "/tasks", {"", MB_BINARY_DIR "/tests/mb_testing_rank", ""}, {std::chrono::milliseconds(50), {}});
  v1::NodeTask task;
  task.set_task_id("t");
  task.mutable_preflight()->mutable_spec()->set_run_name("preflight=hang");
  tasks.Add(task, start_, &children_);
  v1::SyncRequest request;
  for (int i = 0; i < 500 && request.results().empty(); ++i) {
    ::usleep(10'000);
    children_.Reap();
    tasks.Tick(std::chrono::steady_clock::now(), &children_);
    tasks.FillResults(&request);
  }
  ASSERT_EQ(request.results().size(), 1);
  EXPECT_THAT(request.results(0).detail(), ::testing::HasSubstr("took too long"));
}

TEST(CoordinatorLink, NamesTheOptionThatIsWrong) {
  const auto message = [](const LinkOptions& options) { return std::string(CoordinatorLink::Open(options).status().message()); };
  EXPECT_THAT(message({}), ::testing::HasSubstr("--coordinator"));
  EXPECT_THAT(message({"x:1", "", "cert", "key"}), ::testing::HasSubstr("--tls-ca"));
  EXPECT_THAT(message({"x:1", "ca", "cert", ""}), ::testing::HasSubstr("--tls-key"));
  EXPECT_THAT(message({"x:1", "/nonexistent/ca.pem", "", ""}), ::testing::HasSubstr("/nonexistent/ca.pem"));
}

TEST(CoordinatorLink, AFailedCallIsAnAnswerAndTheNextOneConnectsAnew) {
  auto link = CoordinatorLink::Open({"unix:/nonexistent/c.sock", "", "", ""});
  ASSERT_TRUE(link.ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE((*link)->TakeAnswer().has_value());
    (*link)->StartSync(v1::SyncRequest(), std::chrono::seconds(20));
    (*link)->Wait(std::chrono::seconds(20));
    const auto answer = (*link)->TakeAnswer();
    ASSERT_TRUE(answer.has_value());
    EXPECT_TRUE(absl::IsUnavailable(answer->status())) << answer->status();
    EXPECT_FALSE((*link)->busy());
  }
  (*link)->StartSync(v1::SyncRequest(), std::chrono::hours(1));  // The destructor does not wait for it.
}

TEST(Inventory, KnowsItsNode) {
  const v1::NodeInventory inventory = ReadInventory(0);
  EXPECT_FALSE(inventory.hostname().empty());
  EXPECT_EQ(inventory.boot_id().size(), 36u);
  EXPECT_GE(inventory.cpu_cores(), 1);
  EXPECT_GT(inventory.memory_bytes(), 1 << 20);
  EXPECT_EQ(ReadInventory(5).cpu_cores(), 5);
}

TEST(Inventory, NamesTheWidestInstructionSet) {
  EXPECT_EQ(InstructionSet(" fpu sse2 avx2 fma"), "AVX2");
  EXPECT_EQ(InstructionSet("avx2 avx512f avx512_bf16"), "AVX512-BF16");
  EXPECT_EQ(InstructionSet("avx2 avx512f"), "AVX512");
  EXPECT_EQ(InstructionSet("avx2 avx512f avx512_bf16 amx_bf16 amx_tile"), "AMX");
  EXPECT_EQ(InstructionSet("sse2"), "");
}

}  // namespace
}  // namespace mbridge::agent
