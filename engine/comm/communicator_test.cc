#include "engine/comm/communicator.h"

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/comm/file_store.h"
#include "engine/comm/test_support.h"

namespace mbridge {
namespace {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = testing::TempDir() + "comm_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

GlooOptions Options(const TemporaryDirectory& directory, int rank, int size, double timeout_seconds = 30) {
  return {directory.path(), "world", rank, size, timeout_seconds};
}

template <class T> Tensor View(std::vector<T>& data) {
  return {data.data(), kDTypeOf<T>, DeviceType::kCpu, {static_cast<int64_t>(data.size())}};
}

// Values whose float sum depends on the order.
float Sample(int rank, int64_t i) {
  return std::ldexp(1.0f + static_cast<float>((i * 7919 + rank * 104729) % 4093) / 4093.0f,
                    static_cast<int>((i + 5 * rank) % 24) - 12);
}

class GlooSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooSizes, testing::Values(2, 3, 4));

TEST_P(GlooSizes, FloatSumsAreTakenInRankOrder) {
  const int size = GetParam();
  // One element, the small path, an odd number in the chunked path, several chunks.
  for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{100003}, int64_t{2500001}}) {
    OnRanks(size, [&](Communicator& world) {
      std::vector<float> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[i] = Sample(world.rank(), i);
      world.AllReduce(View(data), ReduceOp::kSum);
      int64_t wrong = 0;
      for (int64_t i = 0; i < count; ++i) {
        float expected = Sample(0, i);
        for (int rank = 1; rank < size; ++rank) expected += Sample(rank, i);
        wrong += data[i] != expected ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0) << count;
    });
  }
}

TEST_P(GlooSizes, BFloat16IsSummedInFloatAndRoundedOnce) {
  const int size = GetParam();
  OnRanks(size, [&](Communicator& world) {
    constexpr int64_t kCount = 70000;
    std::vector<BFloat16> data(kCount);
    for (int64_t i = 0; i < kCount; ++i) data[i] = ToBFloat16(Sample(world.rank(), i));
    world.AllReduce(View(data), ReduceOp::kSum);
    int64_t wrong = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      float expected = ToFloat(ToBFloat16(Sample(0, i)));
      for (int rank = 1; rank < size; ++rank) expected += ToFloat(ToBFloat16(Sample(rank, i)));
      wrong += data[i].bits != ToBFloat16(expected).bits ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0);
  });
}

TEST_P(GlooSizes, IntegersDoublesAndMaximum) {
  const int size = GetParam();
  OnRanks(size, [&](Communicator& world) {
    std::vector<int64_t> integers = {world.rank() + 1, -world.rank(), int64_t{1} << 40};
    world.AllReduce(View(integers), ReduceOp::kSum);
    EXPECT_THAT(integers, testing::ElementsAre(size * (size + 1) / 2, -size * (size - 1) / 2, size * (int64_t{1} << 40)));
    std::vector<double> doubles(3, 0.1 * (world.rank() + 1));
    world.AllReduce(View(doubles), ReduceOp::kSum);
    double expected = 0.1;
    for (int rank = 1; rank < size; ++rank) expected += 0.1 * (rank + 1);
    EXPECT_EQ(doubles[1], expected);
    std::vector<float> maxima = {static_cast<float>(world.rank()), -static_cast<float>(world.rank()),
                                 world.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 5.0f};
    world.AllReduce(View(maxima), ReduceOp::kMax);
    EXPECT_EQ(maxima[0], static_cast<float>(size - 1));
    EXPECT_EQ(maxima[1], 0.0f);
    EXPECT_TRUE(std::isnan(maxima[2]));
  });
}

TEST_P(GlooSizes, ReduceScatterAllGatherBroadcastBarrier) {
  const int size = GetParam();
  OnRanks(size, [&](Communicator& world) {
    constexpr int64_t kPart = 5001;
    std::vector<float> input(static_cast<size_t>(kPart * size)), part(kPart), all(static_cast<size_t>(kPart * size));
    for (size_t i = 0; i < input.size(); ++i) input[i] = Sample(world.rank(), static_cast<int64_t>(i));
    world.ReduceScatter(View(input), View(part));
    world.AllGather(View(part), View(all));
    int64_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      float expected = Sample(0, static_cast<int64_t>(i));
      for (int rank = 1; rank < size; ++rank) expected += Sample(rank, static_cast<int64_t>(i));
      wrong += all[i] != expected ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0);
    for (int root = 0; root < size; ++root) {
      std::vector<uint8_t> bytes(100, static_cast<uint8_t>(world.rank()));
      world.Broadcast(View(bytes), root);
      EXPECT_THAT(bytes, testing::Each(static_cast<uint8_t>(root)));
    }
    world.Barrier();
  });
}

TEST(GlooCommunicator, SplitsIntoPartsThatDoNotMeet) {
  OnRanks(4, [](Communicator& world) {
    // Columns and rows of a 2 x 2 grid, as tensor- and data-parallel groups.
    const int rank = world.rank(), row = rank / 2, column = rank % 2;
    const auto tensor = world.Split({2 * row, 2 * row + 1}, "tensor"), data = world.Split({column, column + 2}, "data");
    EXPECT_EQ(tensor->rank(), column);
    EXPECT_EQ(data->rank(), row);
    std::vector<int64_t> sums = {rank}, more = {rank};
    tensor->AllReduce(View(sums), ReduceOp::kSum);
    data->AllReduce(View(more), ReduceOp::kSum);
    EXPECT_EQ(sums[0], 4 * row + 1);
    EXPECT_EQ(more[0], 2 * column + 2);
    EXPECT_EQ(world.Split({rank}, "own")->size(), 1);
    EXPECT_THROW(world.Split({(rank + 1) % 4}, "other"), EngineError);
  });
}

TEST(SelfCommunicator, IsTheIdentity) {
  const auto self = MakeSelfCommunicator();
  EXPECT_EQ(self->size(), 1);
  std::vector<float> data = {1, 2}, out(2);
  self->AllReduce(View(data), ReduceOp::kSum);
  self->ReduceScatter(View(data), View(out));
  EXPECT_EQ(out, data);
  self->AllGather(View(data), View(data));
  EXPECT_THAT(data, testing::ElementsAre(1, 2));
}

TEST(GlooCommunicator, WrongPartsAreAnError) {
  OnRanks(2, [](Communicator& world) {
    std::vector<float> input(5), output(2);
    EXPECT_THROW(world.ReduceScatter(View(input), View(output)), EngineError);
  });
}

v1::Reason ReasonOfCall(const std::function<void()>& call) {
  try {
    call();
  } catch (const EngineError& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.reason();
  }
  return v1::REASON_UNSPECIFIED;
}

TEST(GlooCommunicator, AMissingRankEndsTheRendezvousInTime) {
  TemporaryDirectory directory;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(ReasonOfCall([&] { MakeGlooCommunicator(Options(directory, 0, 2, 0.5)); }), v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

// The peer connects and then behaves as `peer` says; the parent's view of the next all-reduce.
v1::Reason AllReduceAgainst(double timeout_seconds, const std::function<void(Communicator&)>& peer, pid_t* child) {
  TemporaryDirectory directory;
  *child = fork();
  if (*child == 0) {
    try {
      const auto world = MakeGlooCommunicator(Options(directory, 1, 2));
      world->Barrier();
      peer(*world);
    } catch (const std::exception&) {}
    _exit(0);
  }
  const auto world = MakeGlooCommunicator(Options(directory, 0, 2, timeout_seconds));
  world->Barrier();
  std::vector<float> data(1 << 20);
  const v1::Reason reason = ReasonOfCall([&] {
    for (int i = 0; i < 1000; ++i) world->AllReduce(View(data), ReduceOp::kSum);
  });
  // The group stays broken, and says so at once.
  EXPECT_EQ(ReasonOfCall([&] { world->Barrier(); }), v1::REASON_PEER_LOST);
  return reason;
}

TEST(GlooCommunicator, AKilledPeerIsLostAtOnce) {
  pid_t child = 0;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(AllReduceAgainst(
                60,
                [](Communicator& world) {
                  std::vector<float> data(1 << 20);
                  for (int i = 0; i < 3; ++i) world.AllReduce(View(data), ReduceOp::kSum);
                  raise(SIGKILL);
                },
                &child),
            v1::REASON_PEER_LOST);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  waitpid(child, nullptr, 0);
}

TEST(GlooCommunicator, AStoppedPeerIsATimeout) {
  pid_t child = 0;
  EXPECT_EQ(AllReduceAgainst(
                1.0, [](Communicator&) { raise(SIGSTOP); }, &child),
            v1::REASON_COLLECTIVE_TIMEOUT);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(FileStore, KeysOfGroupsAreApartAndMayHoldAnyByte) {
  TemporaryDirectory directory;
  FileStore a(directory.path() + "/new", "a", 0.2), b(directory.path() + "/new", "b", 0.2);
  a.set("../x\n", {'1', '\0', '2'});
  EXPECT_THAT(a.get("../x\n"), testing::ElementsAre('1', '\0', '2'));
  EXPECT_EQ(ReasonOfCall([&] { b.get("../x\n"); }), v1::REASON_COLLECTIVE_TIMEOUT);
  EXPECT_EQ(ReasonOfCall([&] { FileStore("/proc/none/such", "a", 1); }), v1::REASON_ENGINE_ERROR);
}

}  // namespace
}  // namespace mbridge
