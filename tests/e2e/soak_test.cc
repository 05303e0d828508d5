// Many short jobs: nothing may grow. MB_FULL=1 makes it long.
#include <fcntl.h>

#include <cstring>
#include <random>
#include <tuple>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

struct Footprint {
  long resident_kib = 0;
  long threads = 0;
  long descriptors = 0;
};

Footprint Measure(pid_t pid) {
  const std::filesystem::path directory = "/proc/" + std::to_string(pid);
  const std::string status = ReadFile(directory / "status");
  const auto number = [&](const char* name) { return std::stol(status.substr(status.find(name) + strlen(name))); };
  const auto descriptors = std::filesystem::directory_iterator(directory / "fd");
  return {number("VmRSS:"), number("Threads:"), std::distance(begin(descriptors), end(descriptors))};
}

TEST(Soak, ShortJobsAndCancelsLeaveNothing) {
  const bool full = getenv("MB_FULL") != nullptr;
  const int jobs = full ? 300 : 12;
  Service service;
  ASSERT_TRUE(service.Start()) << service.log_text();
  std::mt19937 random(7);
  const auto run_one = [&](int i) {
    const bool cancel = i % 3 == 2;
    const std::string id = service.Submit(TinyJob(cancel ? 100'000 : 3));
    if (cancel) {
      service.WaitForStep(id, 1 + random() % 5);
      EXPECT_THAT(service.Mbctl({"cancel", "--kill", id}), Exited(0));
    }
    const v1::Job job = service.WaitForEnd(id);
    EXPECT_EQ(job.state(), cancel ? v1::JOB_STATE_CANCELLED : v1::JOB_STATE_SUCCEEDED) << job.detail();
  };
  for (int i = 0; i < 3; ++i) run_one(i);  // Warm-up: pools and caches fill.
  const pid_t coordinator = service.coordinator().pid();
  ASSERT_EQ(service.Pids("mbagent").size(), 1u);
  const pid_t agent = service.Pids("mbagent").front();
  const Footprint coordinator_before = Measure(coordinator), agent_before = Measure(agent);
  for (int i = 0; i < jobs; ++i) run_one(i);
  ASSERT_TRUE(service.NoneLeft("mbrank"));
  ASSERT_TRUE(service.NoneLeft("mbshim"));
  for (const auto& [name, pid, before] :
       {std::tuple{"coordinator", coordinator, coordinator_before}, {"agent", agent, agent_before}}) {
    const Footprint after = Measure(pid);
    EXPECT_LE(after.descriptors, before.descriptors + 10) << name;
    EXPECT_LE(after.threads, before.threads + 8) << name;
    EXPECT_LE(after.resident_kib, before.resident_kib + 20'000 + 100L * jobs) << name;
  }
}

}  // namespace
}  // namespace mbridge::e2e
