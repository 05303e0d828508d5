#include "engine/core/side_stream.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mbridge {
namespace {

// Until it holds, at most 20 s.
template <class F> bool Soon(F&& holds) {
  for (int i = 0; i < 20000 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return holds();
}

TEST(SideStream, WorkGoesOnBesideTheCaller) {
  const auto side = MakeSideStream({}, 2);
  std::atomic<bool> go{false}, done{false};
  side->Start(0, [&] { done = Soon([&] { return go.load(); }); });
  EXPECT_FALSE(done);
  go = true;  // Only a caller that did not wait comes here.
  side->Join(0);
  EXPECT_TRUE(done);
}

TEST(SideStream, WorkIsDoneInOrderAndASlotIsWaitedForAlone) {
  const auto side = MakeSideStream({}, 3);
  std::vector<int> order;
  std::atomic<bool> go{false};
  for (int round = 0; round < 2; ++round) {
    side->Start(0, [&] { order.push_back(0); });
    side->Start(1, [&] { order.push_back(1); });
    side->Join(1);
  }
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 0, 1));
  side->Start(0, [&] { order.push_back(0); });
  side->Start(2, [&] {
    EXPECT_TRUE(Soon([&] { return go.load(); }));
    order.push_back(2);
  });
  side->Join(0);  // Not for the third.
  EXPECT_EQ(order.size(), 5u);
  go = true;
  side->Join(2);
  EXPECT_EQ(order.back(), 2);
}

TEST(SideStream, AnErrorComesOutInTheCallersThreadAndEndsAllWork) {
  const auto side = MakeSideStream({}, 2);
  bool ran = false;
  std::atomic<bool> go{false};
  side->Start(0, [&] {
    Soon([&] { return go.load(); });
    throw EngineError(v1::REASON_PEER_LOST, "rank 1 of 2 is gone");
  });
  side->Start(1, [&] { ran = true; });
  go = true;
  for (int i = 0; i < 2; ++i) {
    try {
      side->Join(1);
      FAIL() << "no error";
    } catch (const EngineError& error) {
      EXPECT_EQ(error.reason(), v1::REASON_PEER_LOST);
      EXPECT_STREQ(error.what(), "rank 1 of 2 is gone");
    }
  }
  EXPECT_THROW(side->Start(0, [] {}), EngineError);
  side->Stop();
  EXPECT_FALSE(ran);
}

TEST(SideStream, StopDropsWhatHasNotBegun) {
  const auto side = MakeSideStream({}, 2);
  std::atomic<bool> begun{false}, go{false};
  bool first = false, second = false;
  side->Start(0, [&] {
    begun = true;
    Soon([&] { return go.load(); });
    first = true;
  });
  side->Start(1, [&] { second = true; });
  ASSERT_TRUE(Soon([&] { return begun.load(); }));
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    go = true;
  });
  side->Stop();
  release.join();
  EXPECT_TRUE(first);
  EXPECT_FALSE(second);
}

TEST(InlineStream, WorksAtOnce) {
  const auto side = MakeInlineStream({});
  int done = 0;
  side->Start(5, [&] { ++done; });
  EXPECT_EQ(done, 1);
  side->Join(5);
}

}  // namespace
}  // namespace mbridge
