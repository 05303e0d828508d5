#include "server/store/store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "proto/rpc/status_details.h"
#include "server/store/keys.h"

extern char** environ;

namespace mbridge::server {
namespace {

namespace fs = std::filesystem;

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::temp_directory_path() / ("mb_store_test." + std::to_string(getpid()));
    fs::remove_all(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::unique_ptr<Store> MustOpen(rocksdb::Env* env = nullptr) {
    auto store = Store::Open({.directory = directory_.string(), .on_write = nullptr, .testing_env = env});
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? std::move(store).value() : nullptr;
  }
  v1::Reason OpenFailure() {
    auto store = Store::Open({.directory = directory_.string(), .on_write = nullptr});
    message_ = std::string(store.status().message());
    return store.ok() ? v1::REASON_UNSPECIFIED : ReasonOf(store.status());
  }

  fs::path directory_;
  std::string message_;
};

v1::Job MakeJob(const std::string& id, v1::JobState state = v1::JOB_STATE_QUEUED) {
  v1::Job job;
  job.set_job_id(id);
  job.set_state(state);
  auto* value = job.mutable_resolved()->add_values();
  value->set_key("model.num_layers");
  value->set_value("2");
  return job;
}

v1::JobEvent MakeEvent(const std::string& job_id, int64_t sequence) {
  v1::JobEvent event;
  event.set_job_id(job_id);
  event.set_sequence(sequence);
  event.set_kind(v1::EVENT_KIND_STATE);
  return event;
}

v1::MetricPoint MakePoint(int attempt, int64_t step, double loss, v1::MetricKind kind = v1::METRIC_KIND_TRAIN) {
  v1::MetricPoint point;
  point.set_attempt(attempt);
  point.set_step(step);
  point.set_lm_loss(loss);
  point.set_kind(kind);
  return point;
}

Transition JobOnly(const std::string& id) {
  Transition transition;
  transition.job = MakeJob(id);
  transition.store_resolved = true;
  return transition;
}

std::vector<std::string> JobIds(const Store& store, const std::string& before = "") {
  std::vector<std::string> ids;
  EXPECT_TRUE(store
                  .VisitJobs(before,
                             [&](const v1::Job& job) {
                               ids.push_back(job.job_id());
                               return true;
                             })
                  .ok());
  return ids;
}

TEST_F(StoreTest, ATransitionSurvivesAReopen) {
  {
    auto store = MustOpen();
    Transition transition = JobOnly("j-1");
    transition.events = {MakeEvent("j-1", 1), MakeEvent("j-1", 2)};
    transition.metrics = {{"j-1", MakePoint(1, 1, NAN)}};
    transition.idempotency = IdempotencyRecord{"r-1", "j-1", "hash", 4102444800};
    v1::NodeTask task;
    task.set_task_id("t-1");
    transition.outbox_add = {{"node-a", task}};
    transition.acknowledged = {{"j-1", 1, 17}};
    ASSERT_TRUE(store->Commit(transition).ok());
  }
  auto store = MustOpen();
  auto job = store->GetJob("j-1");
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->resolved().values_size(), 0) << "job rows stay small";
  EXPECT_EQ(store->GetResolved("j-1")->values_size(), 1);
  EXPECT_EQ(store->ListEvents("j-1", 1, 10)->front().sequence(), 2);
  EXPECT_TRUE(std::isnan(store->ListMetrics("j-1", 0, false, "", 10)->points[0].lm_loss()));
  EXPECT_EQ((*store->FindRequest("r-1"))->body_hash, "hash");
  EXPECT_FALSE(store->FindRequest("r-2")->has_value());
  EXPECT_EQ(store->ListOutbox()->front().node_id, "node-a");
  EXPECT_EQ(*store->AcknowledgedSequence("j-1", 1), 17u);
  EXPECT_EQ(ReasonOf(store->GetJob("j-2").status()), v1::REASON_JOB_NOT_FOUND);
}

TEST_F(StoreTest, RequestIdsExpireAfterSevenDays) {
  {
    auto store = MustOpen();
    Transition transition = JobOnly("j-1");
    transition.idempotency = IdempotencyRecord{"old", "j-1", "hash", std::time(nullptr) - 8 * 24 * 3600};
    ASSERT_TRUE(store->Commit(transition).ok());
    transition.idempotency = IdempotencyRecord{"young", "j-1", "hash", std::time(nullptr) - 6 * 24 * 3600};
    ASSERT_TRUE(store->Commit(transition).ok());
  }
  auto store = MustOpen();
  EXPECT_FALSE(store->FindRequest("old")->has_value());
  EXPECT_TRUE(store->FindRequest("young")->has_value());
}

TEST_F(StoreTest, JobsAreListedNewestFirstBelowTheCursor) {
  auto store = MustOpen();
  EXPECT_TRUE(JobIds(*store).empty());
  for (const char* id : {"j-1", "j-2", "j-3"}) ASSERT_TRUE(store->Commit(JobOnly(id)).ok());
  EXPECT_THAT(JobIds(*store), ::testing::ElementsAre("j-3", "j-2", "j-1"));
  EXPECT_THAT(JobIds(*store, "j-3"), ::testing::ElementsAre("j-2", "j-1"));
  EXPECT_THAT(JobIds(*store, "j-1"), ::testing::IsEmpty());
}

TEST_F(StoreTest, RepeatedMetricsOverwriteAndAttemptsStayApart) {
  auto store = MustOpen();
  Transition transition;
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (int step = 1; step <= 3; ++step) transition.metrics.emplace_back("j-1", MakePoint(1, step, step));
  }
  transition.metrics.emplace_back("j-1", MakePoint(2, 3, 30));
  transition.metrics.emplace_back("j-1", MakePoint(2, 4, 40));
  transition.metrics.emplace_back("j-1", MakePoint(2, 4, 41, v1::METRIC_KIND_VALIDATION));
  transition.metrics.emplace_back("j-10", MakePoint(1, 1, 99));
  ASSERT_TRUE(store->Commit(transition).ok());

  const auto losses = [&](int attempt, bool effective) {
    std::vector<double> values;
    std::string cursor;
    for (bool end = false; !end;) {
      auto page = store->ListMetrics("j-1", attempt, effective, cursor, 2);
      EXPECT_TRUE(page.ok());
      for (const auto& point : page->points) values.push_back(point.lm_loss());
      cursor = page->cursor;
      end = page->end;
    }
    return values;
  };
  EXPECT_THAT(losses(0, false), ::testing::ElementsAre(1, 2, 3, 30, 40, 41));
  EXPECT_THAT(losses(0, true), ::testing::ElementsAre(1, 2, 30, 40, 41));
  EXPECT_THAT(losses(1, false), ::testing::ElementsAre(1, 2, 3));
  EXPECT_THAT(losses(3, false), ::testing::IsEmpty());
  EXPECT_EQ(ReasonOf(store->ListMetrics("j-1", 0, false, "junk", 2).status()), v1::REASON_INVALID_REQUEST);
}

TEST_F(StoreTest, ASecondCoordinatorIsRefusedByPid) {
  auto store = MustOpen();
  EXPECT_EQ(OpenFailure(), v1::REASON_STORE_LOCKED);
  EXPECT_THAT(message_, ::testing::HasSubstr("process " + std::to_string(getpid())));
}

TEST_F(StoreTest, ANewerStoreIsRefused) {
  MustOpen();
  {
    rocksdb::DB* raw = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), (directory_ / "db").string(), &raw).ok());
    std::unique_ptr<rocksdb::DB> db(raw);
    ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), "Vversion", std::to_string(kStoreVersion + 1)).ok());
  }
  EXPECT_EQ(OpenFailure(), v1::REASON_STORE_TOO_NEW);
}

TEST_F(StoreTest, ABadRowIsMovedAsideAndNamed) {
  ASSERT_TRUE(MustOpen()->Commit(JobOnly("j-1")).ok());
  {
    rocksdb::DB* raw = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), (directory_ / "db").string(), &raw).ok());
    std::unique_ptr<rocksdb::DB> db(raw);
    ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), "Jj-2", "\xff\xff half a record").ok());
  }
  auto store = MustOpen();
  EXPECT_THAT(store->Quarantined(), ::testing::ElementsAre("Jj-2"));
  EXPECT_THAT(JobIds(*store), ::testing::ElementsAre("j-1"));
  store.reset();
  EXPECT_TRUE(MustOpen()->Quarantined().empty()) << "moved aside once";
}

// --- Damage: open with all rows, or refuse.

std::vector<fs::path> FilesOf(const fs::path& directory, const std::string& part) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().find(part) != std::string::npos) files.push_back(entry.path());
  }
  return files;
}

TEST_F(StoreTest, FlippedBitsNeverLoseAJobSilently) {
  constexpr int kJobs = 20;
  {
    auto store = MustOpen();
    for (int i = 0; i < kJobs; ++i) ASSERT_TRUE(store->Commit(JobOnly("j-" + std::to_string(100 + i))).ok());
  }
  {
    auto store = MustOpen();
    ASSERT_TRUE(store->Commit(JobOnly("j-999")).ok());
  }  // The first 20 are in an SST now.
  const fs::path pristine = directory_.string() + ".pristine";
  fs::remove_all(pristine);
  fs::copy(directory_, pristine, fs::copy_options::recursive);
  std::mt19937 random(7);
  int refused = 0;
  for (const char* part : {".log", ".sst", "MANIFEST", "CURRENT"}) {
    for (int round = 0; round < 8; ++round) {
      fs::remove_all(directory_);
      fs::copy(pristine, directory_, fs::copy_options::recursive);
      const auto files = FilesOf(directory_ / "db", part);
      ASSERT_FALSE(files.empty()) << part;
      const fs::path& file = files[random() % files.size()];
      const auto size = fs::file_size(file);
      if (size == 0) continue;
      const auto offset = static_cast<std::streamoff>(random() % size);
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(offset);
      const char flipped = static_cast<char>(stream.get() ^ 1 << random() % 8);
      stream.seekp(offset);
      stream.put(flipped);
      stream.close();
      auto store = Store::Open({.directory = directory_.string(), .on_write = nullptr});
      if (!store.ok()) {
        ++refused;
        EXPECT_EQ(ReasonOf(store.status()), v1::REASON_STORE_DAMAGED) << store.status();
      } else {
        EXPECT_EQ(JobIds(**store).size() + (*store)->Quarantined().size(), kJobs + 1u) << file << " byte " << offset;
      }
    }
  }
  EXPECT_GT(refused, 8);
  fs::remove_all(pristine);
}

TEST_F(StoreTest, ALogCutBelowAnAcknowledgedWriteIsDamage) {
  {
    auto store = MustOpen();
    ASSERT_TRUE(store->Commit(JobOnly("j-1")).ok());
    ASSERT_TRUE(store->Commit(JobOnly("j-2")).ok());
  }
  const fs::path log = FilesOf(directory_ / "db", ".log").front();
  ASSERT_GT(fs::file_size(log), 10u);
  fs::resize_file(log, fs::file_size(log) - 10);
  EXPECT_EQ(OpenFailure(), v1::REASON_STORE_DAMAGED);
  EXPECT_THAT(message_, ::testing::HasSubstr("acknowledged"));
}

TEST_F(StoreTest, AMissingCurrentFileIsNotAFreshStore) {
  ASSERT_TRUE(MustOpen()->Commit(JobOnly("j-1")).ok());
  fs::remove(directory_ / "db" / "CURRENT");
  EXPECT_EQ(OpenFailure(), v1::REASON_STORE_DAMAGED);
}

// --- kill -9 of a writing process.

// Not a test: the body of the child below. Prints the id of every acknowledged job.
TEST(StoreChild, DISABLED_Writer) {
  const char* directory = getenv("MB_STORE_CHILD");
  if (directory == nullptr) GTEST_SKIP();
  auto store = Store::Open({.directory = directory, .on_write = nullptr});
  ASSERT_TRUE(store.ok());
  size_t next = JobIds(**store).size();
  for (;; ++next) {
    const uint32_t id = static_cast<uint32_t>(next);
    if (!(*store)->Commit(JobOnly("j-" + std::to_string(100000 + id))).ok()) _exit(1);
    if (write(STDERR_FILENO, &id, sizeof id) != sizeof id) _exit(1);
  }
}

TEST_F(StoreTest, KillNineLosesNoAcknowledgedJob) {
  size_t acknowledged = 0;
  for (int round = 0; round < 4; ++round) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    setenv("MB_STORE_CHILD", directory_.c_str(), 1);
    const char* argv[] = {"store_child", "--gtest_filter=StoreChild.DISABLED_Writer", "--gtest_also_run_disabled_tests", nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, "/proc/self/exe", &actions, nullptr, const_cast<char**>(argv), environ), 0);
    unsetenv("MB_STORE_CHILD");
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    uint32_t id = 0;
    for (int jobs = 0; jobs < 15 + round && read(ends[0], &id, sizeof id) == sizeof id; ++jobs) {}
    kill(child, SIGKILL);
    while (read(ends[0], &id, sizeof id) == sizeof id) {}
    close(ends[0]);
    waitpid(child, nullptr, 0);
    acknowledged = id + 1;
    auto store = MustOpen();
    ASSERT_NE(store, nullptr);
    EXPECT_GE(JobIds(*store).size(), acknowledged);
  }
  EXPECT_GE(acknowledged, 60u);
}

// --- A full disk.

class FullFile : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FullFile(std::unique_ptr<rocksdb::FSWritableFile> file, const std::atomic<bool>* full)
      : FSWritableFileOwnerWrapper(std::move(file)), full_(full) {}
  using FSWritableFileOwnerWrapper::Append;
  rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions& options,
                           rocksdb::IODebugContext* debug) override {
    if (*full_) return rocksdb::IOStatus::NoSpace("No space left on device");
    return FSWritableFileOwnerWrapper::Append(data, options, debug);
  }

 private:
  const std::atomic<bool>* full_;
};

class FullFileSystem : public rocksdb::FileSystemWrapper {
 public:
  FullFileSystem() : FileSystemWrapper(rocksdb::FileSystem::Default()) {}
  const char* Name() const override { return "FullFileSystem"; }
  rocksdb::IOStatus NewWritableFile(const std::string& name, const rocksdb::FileOptions& options,
                                    std::unique_ptr<rocksdb::FSWritableFile>* result, rocksdb::IODebugContext* debug) override {
    auto status = FileSystemWrapper::NewWritableFile(name, options, result, debug);
    if (status.ok()) *result = std::make_unique<FullFile>(std::move(*result), &full);
    return status;
  }
  std::atomic<bool> full{false};
};

TEST_F(StoreTest, AFullDiskIsSaidAndRecoversByItself) {
  auto disk = std::make_shared<FullFileSystem>();
  auto env = rocksdb::NewCompositeEnv(disk);
  {
    auto store = MustOpen(env.get());
    ASSERT_TRUE(store->Commit(JobOnly("j-1")).ok());
    disk->full = true;
    for (int i = 0; i < 3; ++i) {
      const auto refused = store->Commit(JobOnly("j-2"));
      EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
      EXPECT_EQ(ReasonOf(refused), v1::REASON_STORE_FULL);
    }
    EXPECT_THAT(JobIds(*store), ::testing::ElementsAre("j-1")) << "reads go on, nothing was stored";
    disk->full = false;
    EXPECT_TRUE(store->Commit(JobOnly("j-3")).ok());
  }
  EXPECT_THAT(JobIds(*MustOpen()), ::testing::ElementsAre("j-3", "j-1"));
}

}  // namespace
}  // namespace mbridge::server
