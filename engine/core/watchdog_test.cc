#include "engine/core/watchdog.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

struct End {
  v1::Reason reason;
  std::string detail;
};

class WatchdogTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "watchdog_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  WatchdogOptions Options(double timeout, double grace, int rank = 0) {
    WatchdogOptions options;
    options.timeout_seconds = timeout;
    options.grace_seconds = grace;
    options.rank = rank;
    options.size = 2;
    options.pulse_path = directory_ + "/pulses";
    options.end = [this](v1::Reason reason, const std::string& detail) { ended_.set_value({reason, detail}); };
    return options;
  }
  std::optional<End> EndWithin(milliseconds time) {
    std::future<End> future = ended_.get_future();
    if (future.wait_for(time) != std::future_status::ready) return std::nullopt;
    return future.get();
  }

  std::string directory_;
  std::promise<End> ended_;
};

TEST_F(WatchdogTest, EndsAProcessWhoseCollectiveDoesNotFinish) {
  const Watchdog watchdog(Options(0.2, 0.1));
  const WaitNote note("all-reduce", "world/data");
  const auto begin = std::chrono::steady_clock::now();
  const auto end = EndWithin(milliseconds(5000));
  ASSERT_TRUE(end.has_value());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(300));
  EXPECT_EQ(end->reason, v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_THAT(end->detail, HasSubstr("all-reduce in group world/data has not finished within 0.2 s"));
}

TEST_F(WatchdogTest, HearsOfWhatIsThrownBeforeTheUnwinding) {
  const Watchdog watchdog(Options(60, 0.1));
  EXPECT_EQ(NotingFaults([] { return 7; }), 7);
  EXPECT_THROW(NotingFaults([] { throw std::bad_alloc(); }), std::bad_alloc);
  const auto end = EndWithin(milliseconds(5000));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, v1::REASON_OUT_OF_MEMORY);
  EXPECT_THAT(end->detail, HasSubstr("host memory"));
}

TEST_F(WatchdogTest, HearsOfExceptionsOfLibraries) {
  const Watchdog watchdog(Options(60, 0.1));
  EXPECT_THROW(NotingFaults([] { throw std::length_error("too long"); }), std::length_error);
  const auto end = EndWithin(milliseconds(5000));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, v1::REASON_ENGINE_ERROR);
  EXPECT_THAT(end->detail, HasSubstr("too long"));
}

TEST_F(WatchdogTest, LeavesARankAloneThatGoesOnOrWaitsForNobody) {
  const Watchdog watchdog(Options(0.5, 0.2));
  std::future<End> ended = ended_.get_future();
  for (int i = 0; i < 15; ++i) {
    NoteEnqueued("all-reduce", "world");
    std::this_thread::sleep_for(milliseconds(50));
  }
  for (int i = 0; i < 15; ++i) {
    NoteProgress();
    std::this_thread::sleep_for(milliseconds(50));
  }
  NoteIdle();
  std::this_thread::sleep_for(milliseconds(900));  // Work of its own.
  EXPECT_EQ(ended.wait_for(milliseconds(0)), std::future_status::timeout);
}

TEST_F(WatchdogTest, APeerThatComesWithinTheGraceIsNoFault) {
  const Watchdog watchdog(Options(0.2, 0.5));
  std::future<End> ended = ended_.get_future();
  NoteEnqueued("all-reduce", "world");
  std::this_thread::sleep_for(milliseconds(400));
  NoteIdle();
  std::this_thread::sleep_for(milliseconds(700));
  EXPECT_EQ(ended.wait_for(milliseconds(0)), std::future_status::timeout);
}

TEST_F(WatchdogTest, AWaitIsWatchedAndLeavesWhatWasUnderWay) {
  const Watchdog watchdog(Options(0.2, 0.1));
  std::future<End> ended = ended_.get_future();
  NoteIdle();
  { const WaitNote wait; }
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_EQ(ended.wait_for(milliseconds(0)), std::future_status::timeout) << "the wait is over";
  NoteEnqueued("all-reduce", "world");
  { const WaitNote for_less_than_all; }
  EXPECT_EQ(ended.wait_for(milliseconds(5000)), std::future_status::ready);
}

TEST_F(WatchdogTest, TheTimeOfReadingDataDoesNotCount) {
  const Watchdog watchdog(Options(0.4, 0.1));
  std::future<End> ended = ended_.get_future();
  NoteEnqueued("all-gather", "world");
  {
    const ReadingNote reading;
    std::this_thread::sleep_for(milliseconds(1000));
  }
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(ended.wait_for(milliseconds(0)), std::future_status::timeout) << "the device may have done it long ago";
  ASSERT_EQ(ended.wait_for(milliseconds(5000)), std::future_status::ready) << "nothing is read any more";
  EXPECT_THAT(ended.get().detail, HasSubstr("all-gather in group world has not finished within 0.4 s"));
}

TEST_F(WatchdogTest, AWaitIsWatchedWhileAnotherThreadReadsData) {
  const Watchdog watchdog(Options(0.2, 0.1));
  const WaitNote wait("all-reduce", "world");
  const ReadingNote reading;
  EXPECT_TRUE(EndWithin(milliseconds(5000)).has_value());
}

TEST_F(WatchdogTest, ARankThatHangsAfterAFaultEndsWithTheFirst) {
  const Watchdog watchdog(Options(4, 0.2));
  NoteFault(v1::REASON_OUT_OF_MEMORY, "cannot allocate 5 MiB");
  NoteFault(v1::REASON_PEER_LOST, "the group is broken");
  const auto end = EndWithin(milliseconds(5000));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, v1::REASON_OUT_OF_MEMORY);
  EXPECT_THAT(end->detail, HasSubstr("cannot allocate 5 MiB"));
}

TEST_F(WatchdogTest, ARankThatUnwindsInTimeIsNotEnded) {
  {
    const Watchdog watchdog(Options(600, 0.3));
    NoteFault(v1::REASON_PEER_LOST, "the group is broken");
  }
  EXPECT_FALSE(EndWithin(milliseconds(500)).has_value());
}

// Rank 1 lives in a child, which is then stopped.
TEST_F(WatchdogTest, NamesTheRankThatIsStopped) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Watchdog watchdog(Options(60, 10, 1));
    for (;;) ::pause();
  }
  const Watchdog watchdog(Options(2.4, 0.1));
  std::this_thread::sleep_for(milliseconds(300));
  ::kill(child, SIGSTOP);
  NoteEnqueued("all-gather", "world");
  const auto end = EndWithin(milliseconds(8000));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ASSERT_TRUE(end.has_value());
  EXPECT_THAT(end->detail, HasSubstr("all-gather in group world has not finished within 2.4 s: rank 1 has not run for "));
}

TEST_F(WatchdogTest, NamesTheRankThatIsBehindAndReads) {
  EXPECT_EQ(LateRanks(), "") << "without a watchdog nothing is known";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Watchdog watchdog(Options(60, 10, 1));
    { const ReadingNote over; }
    { const WaitNote note("all-reduce", "world"); }
    const ReadingNote reading;
    for (;;) ::pause();
  }
  const Watchdog watchdog(Options(60, 10));
  for (int i = 0; i < 3; ++i) NoteEnqueued("all-reduce", "world");
  std::string late;
  for (int i = 0; i < 100 && late.find("reading") == std::string::npos; ++i) {
    late = LateRanks();
    std::this_thread::sleep_for(milliseconds(50));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(late, "rank 1 did not arrive: 2 collectives behind rank 0, reading data for 1 s");
}

}  // namespace
}  // namespace mbridge
