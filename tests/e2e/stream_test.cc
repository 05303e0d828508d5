// Streams, followers and the Prometheus endpoint.
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <regex>
#include <set>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::HasSubstr;
using testing::Not;

class Streams : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(service_.Start()) << service_.log_text(); }
  Service service_{Service::Options{.environment = {{"MB_FAILPOINTS", "train.iteration=sleep:50"}}}};
};

TEST_F(Streams, FollowerThatLosesTheConnectionExitsWithSeven) {
  const std::string id = service_.Submit(TinyJob(5000));
  service_.WaitForStep(id, 2);
  SpawnOptions options = service_.MbctlOptions();
  options.err_path = service_.directory() / "follower.err";
  options.environment["MBCTL_RECONNECT_SECONDS"] = "2";
  Process follower({Program("mbctl"), "wait", id}, options);
  sleep(1);
  ASSERT_TRUE(follower.running());
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(follower.Wait(Seconds(90)));
  EXPECT_EQ(follower.exit_code(), 7) << ReadFile(options.err_path);
}

TEST_F(Streams, FollowerSurvivesACoordinatorRestart) {
  const std::string id = service_.Submit(TinyJob(80));
  service_.WaitForStep(id, 2);
  SpawnOptions options = service_.MbctlOptions();
  options.out_path = service_.directory() / "follower.out";
  options.err_path = service_.directory() / "follower.err";
  Process follower({Program("mbctl"), "wait", id}, options);
  sleep(1);
  service_.coordinator().Signal(SIGKILL);
  ASSERT_TRUE(service_.coordinator().Wait(Seconds(5)));
  ASSERT_TRUE(service_.Start()) << service_.log_text();
  ASSERT_TRUE(follower.Wait(Seconds(60)));
  EXPECT_EQ(follower.exit_code(), 0) << ReadFile(options.err_path);
}

TEST_F(Streams, InterruptDetachesAndLeavesTheJob) {
  const std::string id = service_.Submit(TinyJob(5000));
  service_.WaitForStep(id, 2);
  SpawnOptions options = service_.MbctlOptions();
  options.err_path = service_.directory() / "follower.err";
  Process follower({Program("mbctl"), "logs", "-f", id}, options);
  sleep(1);
  follower.Signal(SIGINT);
  ASSERT_TRUE(follower.Wait(Seconds(10)));
  EXPECT_EQ(follower.exit_code(), 130);
  EXPECT_THAT(ReadFile(options.err_path), HasSubstr(id));
  EXPECT_EQ(service_.GetJob(id).state(), v1::JOB_STATE_RUNNING);
}

TEST_F(Streams, WaitTimesOutWithSix) {
  const std::string id = service_.Submit(TinyJob(5000));
  EXPECT_THAT(service_.Mbctl({"wait", id, "--timeout", "1s"}), Exited(6));
}

TEST_F(Streams, WatchResumesAfterASequence) {
  const std::string id = service_.Submit(TinyJob(5, {"checkpoint.save_interval=2"}));
  ASSERT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  std::vector<v1::JobEvent> all;
  for (const v1::JobEvent& event : service_.Events(id)) {
    if (event.kind() != v1::EVENT_KIND_PROGRESS) all.push_back(event);
  }
  ASSERT_TRUE(SoundEvents(all));
  ASSERT_GE(all.size(), 4u);
  v1::WatchJobRequest request;
  request.set_job_id(id);
  request.set_after_sequence(all[1].sequence());
  grpc::ClientContext context;
  const auto reader = service_.jobs().WatchJob(&context, request);
  v1::WatchJobResponse response;
  std::vector<int64_t> sequences;
  bool ended = false;
  while (reader->Read(&response)) {
    if (response.has_event() && response.event().kind() != v1::EVENT_KIND_PROGRESS) {
      sequences.push_back(response.event().sequence());
    }
    if (response.has_end()) {
      ended = true;
      EXPECT_EQ(response.end().state(), v1::JOB_STATE_SUCCEEDED);
      EXPECT_EQ(response.end().exit_code(), 0);
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(ended) << "the stream of a finished job ends with its state";
  ASSERT_EQ(sequences.size(), all.size() - 2);
  EXPECT_EQ(sequences.front(), all[2].sequence());
}

TEST_F(Streams, ScrapeHasTheLossOfLiveJobsOnly) {
  const std::string id = service_.Submit(TinyJob(5000));
  service_.WaitForStep(id, 3);
  const std::regex loss("mb_train_loss\\{[^}]*" + id + "[^}]*\\} [0-9]");
  EXPECT_TRUE(WaitUntil([&] { return std::regex_search(service_.Scrape(), loss); }, Seconds(10))) << service_.Scrape();
  ASSERT_THAT(service_.Mbctl({"cancel", "--kill", id}), Exited(0));
  service_.WaitForEnd(id);
  EXPECT_TRUE(WaitUntil([&] { return !std::regex_search(service_.Scrape(), loss); }, Seconds(10)))
      << "the loss of a dead job is still scraped";
}

TEST_F(Streams, NanStaysNan) {
  const std::string id =
      service_.Submit(TinyJob(6, {"optimizer.lr=1e30", "optimizer.min_lr=1e30", "optimizer.clip_grad=0",
                                  "rerun_state_machine.check_for_nan_in_loss=false", "ddp.check_for_nan_in_grad=false"}));
  service_.WaitForEnd(id);
  bool seen = false;
  for (const v1::MetricPoint& point : service_.TrainPoints(id)) seen |= std::isnan(point.lm_loss());
  EXPECT_TRUE(seen);
  const CommandResult logs = service_.Mbctl({"logs", id});
  EXPECT_THAT(logs.out, testing::ContainsRegex("lm loss: +[Nn][Aa][Nn]"));
  EXPECT_THAT(service_.Mbctl({"metrics", id}).out, testing::ContainsRegex("[Nn][Aa][Nn]"));
}

// Every metric name that the alert rules and the boards use exists in a scrape: with a running job that has saved, after a
// restart, and after a failed save (a family without a series is not printed).
TEST_F(Streams, RulesAndBoardsUseMetricsThatExist) {
  const std::string id = service_.Submit(TinyJob(5000, {"checkpoint.save_interval=2", "checkpoint.most_recent_k=2"}));
  service_.WaitForStep(id, 4);
  for (const pid_t pid : service_.Pids("mbrank")) kill(pid, SIGKILL);
  service_.WaitForJob(id, [](const v1::Job& job) { return job.attempts_size() == 2 && job.progress().attempt() == 2; });
  Service full(Service::Options{.environment = {{"MB_FAILPOINTS", "file.write=error:28"}}});
  ASSERT_TRUE(full.Start()) << full.log_text();
  full.WaitForEnd(full.Submit(TinyJob(2, {"checkpoint.save_interval=1"})));
  service_.TrainPoints(id);  // A stream.
  const std::string scrape = service_.Scrape() + full.Scrape();

  std::set<std::string> used;
  for (const char* folder : {"prometheus", "grafana"}) {
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(std::filesystem::path(MB_SOURCE_DIR) / "deploy" / folder)) {
      if (!entry.is_regular_file()) continue;
      const std::string text = ReadFile(entry.path());
      const std::regex name("\\bmb_[a-z0-9_]+\\b");
      for (auto match = std::sregex_iterator(text.begin(), text.end(), name); match != std::sregex_iterator(); ++match) {
        used.insert(match->str());
      }
    }
  }
  ASSERT_GT(used.size(), 15u);
  for (const std::string& name : used) {
    const bool exported =
        scrape.find("\n" + name + " ") != std::string::npos || scrape.find("\n" + name + "{") != std::string::npos;
    EXPECT_TRUE(exported) << name << " is not exported";
  }
  EXPECT_THAT(service_.Mbctl({"cancel", "--kill", id}), Exited(0));
}

// A watcher that never reads must not grow the coordinator's memory.
TEST_F(Streams, StoppedWatchersCostNoMemory) {
  const std::string id = service_.Submit(TinyJob(3000));
  service_.WaitForStep(id, 2);
  const auto resident = [this] {
    const std::string status = ReadFile("/proc/" + std::to_string(service_.coordinator().pid()) + "/status");
    return std::stol(status.substr(status.find("VmRSS:") + 6));
  };
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>>> readers;
  for (int i = 0; i < 50; ++i) {
    v1::WatchJobRequest request;
    request.set_job_id(id);
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    readers.push_back(service_.jobs().WatchJob(contexts.back().get(), request));
  }
  sleep(1);
  const long before = resident();
  sleep(3);
  EXPECT_LT(resident() - before, 20'000) << "KiB in 3 s";
  for (auto& context : contexts) context->TryCancel();
  for (auto& reader : readers) reader->Finish();
  EXPECT_THAT(service_.Mbctl({"cancel", "--kill", id}), Exited(0));
}

}  // namespace
}  // namespace mbridge::e2e
