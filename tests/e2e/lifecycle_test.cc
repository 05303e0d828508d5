// Start, stop, and refusals to start.
#include <rocksdb/db.h>
#include <signal.h>
#include <unistd.h>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Lifecycle : public testing::Test {
 protected:
  Arguments StateArguments() const {
    return {"--state-dir",      (service_.directory() / "other").string(),
            "--listen",         "unix:" + (service_.directory() / "other.sock").string(),
            "--metrics-listen", "none",
            "--no-local-agent"};
  }
  // The folder that holds db/CURRENT.
  std::filesystem::path StoreDirectory() const {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(service_.state_directory())) {
      if (entry.path().filename() == "CURRENT") return entry.path().parent_path().parent_path();
    }
    return {};
  }
  Service service_{Service::Options{.environment = {{"MB_FAILPOINTS", "train.iteration=sleep:50"}}, .tcp = true}};
};

TEST_F(Lifecycle, VersionAndHelp) {
  for (const char* program : {"mbcoordinator", "mbagent", "mbrank", "mbshim", "mbctl"}) {
    const CommandResult version = RunCommand({Program(program), "--version"});
    EXPECT_THAT(version, Exited(0)) << program;
    EXPECT_THAT(version.out, HasSubstr(program));
    EXPECT_THAT(RunCommand({Program(program), "--help"}), Exited(0)) << program;
  }
}

TEST_F(Lifecycle, SigtermLeavesJobsRunning) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const std::string id = service_.Submit(TinyJob(60));
  service_.WaitForStep(id, 3);
  const auto ranks = service_.Pids("mbrank");
  service_.coordinator().Signal(SIGTERM);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(20)));
  EXPECT_EQ(service_.coordinator().exit_code(), 0);
  EXPECT_EQ(service_.Pids("mbrank"), ranks);
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const v1::Job job = service_.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_TRUE(CompleteSeries(service_.TrainPoints(id), 60));
}

TEST_F(Lifecycle, ShutdownEndsEverythingInOrder) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const std::string id = service_.Submit(TinyJob(5000, {"--name", "ended", "checkpoint.save_interval=5000"}));
  service_.WaitForStep(id, 3);
  EXPECT_THAT(service_.Mbctl({"admin", "shutdown", "--yes"}), Exited(0));
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(40)));
  EXPECT_EQ(service_.coordinator().exit_code(), 0);
  EXPECT_TRUE(service_.NoneLeft("")) << "no process is left";
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const v1::Job job = service_.GetJob(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(job.reason(), v1::REASON_SHUTDOWN);
  EXPECT_EQ(service_.Checkpoints("ended").size(), 1u) << "graceful: the ranks save first";
}

TEST_F(Lifecycle, PortInUse) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  Arguments arguments = StateArguments();
  arguments.insert(arguments.end(), {"--listen", service_.tcp_address()});
  const CommandResult result = service_.RunCoordinator(arguments);
  EXPECT_THAT(result, Exited(8));
  EXPECT_THAT(result.err, AllOf(HasSubstr("PORT_IN_USE"), HasSubstr(service_.tcp_address())));
}

TEST_F(Lifecycle, MetricsPortInUse) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  Arguments arguments = StateArguments();
  for (std::string& argument : arguments) {
    if (argument == "none") argument = service_.metrics_address();
  }
  const CommandResult result = service_.RunCoordinator(arguments);
  EXPECT_THAT(result, Exited(8));
  EXPECT_THAT(result.err, HasSubstr(service_.metrics_address()));
}

TEST_F(Lifecycle, SecondCoordinatorOnTheSameStore) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const CommandResult result =
      service_.RunCoordinator({"--state-dir", service_.state_directory(), "--listen",
                               "unix:" + (service_.directory() / "second.sock").string(), "--metrics-listen", "none"});
  EXPECT_THAT(result, Exited(8));
  EXPECT_THAT(result.err, AllOf(HasSubstr("STORE_LOCKED"), HasSubstr(service_.state_directory().string())));
  EXPECT_THAT(service_.Mbctl({"ps"}), Exited(0)) << "the first one goes on";
}

TEST_F(Lifecycle, StoreOfANewerVersionIsRefused) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  service_.coordinator().Signal(SIGTERM);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(20)));
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened = rocksdb::DB::Open(rocksdb::Options(), StoreDirectory() / "db", &db);
  ASSERT_TRUE(opened.ok()) << opened.ToString();
  ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), "Vversion", "999").ok());
  delete db;
  ASSERT_FALSE(service_.Start());
  EXPECT_EQ(service_.coordinator().exit_code(), 8);
  EXPECT_THAT(service_.log_text(), AllOf(HasSubstr("STORE_TOO_NEW"), HasSubstr("999")));
}

TEST_F(Lifecycle, DamagedStoreIsNotOpened) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const std::string id = service_.Submit(TinyJob(2));
  service_.WaitForEnd(id);
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  // Flip bits in the middle of every write-ahead log and manifest of the store.
  int damaged = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(service_.state_directory())) {
    const std::string name = entry.path().filename();
    const bool store_file = entry.path().extension() == ".log" || name.rfind("MANIFEST-", 0) == 0;
    if (!entry.is_regular_file() || !store_file || entry.file_size() < 64) continue;
    if (!std::filesystem::exists(entry.path().parent_path() / "CURRENT")) continue;
    std::string content = ReadFile(entry.path());
    for (size_t i = content.size() / 3; i < content.size() / 3 + 16; ++i) content[i] ^= 0x55;
    WriteFile(entry.path(), content);
    ++damaged;
  }
  ASSERT_GT(damaged, 0) << "no store files found";
  ASSERT_FALSE(service_.Start(Seconds(20)));
  EXPECT_EQ(service_.coordinator().exit_code(), 9);
  EXPECT_THAT(service_.log_text(), HasSubstr("STORE_DAMAGED"));
}

TEST_F(Lifecycle, JobsAndSeriesAreTheSameAfterARestart) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const std::string id = service_.Submit(TinyJob(5, {"--name", "stays", "checkpoint.save_interval=5"}));
  const v1::Job before = service_.WaitForEnd(id);
  const auto points = service_.TrainPoints(id);
  service_.coordinator().Signal(SIGTERM);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(20)));
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  const v1::Job after = service_.GetJob(id);
  EXPECT_EQ(after.state(), before.state());
  EXPECT_EQ(after.reason(), before.reason());
  EXPECT_EQ(after.resolved().config_hash(), before.resolved().config_hash());
  EXPECT_TRUE(SameLosses(points, service_.TrainPoints(id)));
  EXPECT_EQ(service_.Checkpoints("stays").size(), 1u);
}

TEST_F(Lifecycle, DrainedNodeTakesNoNewJobs) {
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  v1::ListNodesResponse nodes;
  ASSERT_TRUE(WaitUntil(
      [&] {
        grpc::ClientContext context;
        return service_.nodes().ListNodes(&context, {}, &nodes).ok() && nodes.nodes_size() == 1;
      },
      Seconds(20)));
  const std::string node = nodes.nodes(0).node_id();
  ASSERT_THAT(service_.Mbctl({"node", "drain", node}), Exited(0));
  const std::string id = service_.Submit(TinyJob(2));
  sleep(1);
  const v1::Job waiting = service_.GetJob(id);
  EXPECT_EQ(waiting.state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(waiting.reason(), v1::REASON_WAITING_FOR_NODE);
  ASSERT_THAT(service_.Mbctl({"node", "undrain", node}), Exited(0));
  EXPECT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
}

}  // namespace
}  // namespace mbridge::e2e
