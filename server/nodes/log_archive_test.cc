#include "server/nodes/log_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "server/nodes/names.h"
#include "server/nodes/rank_specs.h"

namespace mbridge::server {
namespace {

class LogArchiveTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(directory_); }
  void Append(int64_t offset, const std::string& data, int64_t dropped = 0) {
    v1::LogChunk chunk;
    chunk.set_offset(offset);
    chunk.set_data(data);
    chunk.set_dropped_bytes(dropped);
    ASSERT_TRUE(archive_.Append("j-1", 1, chunk).ok());
  }
  std::string directory_ = std::filesystem::temp_directory_path() / ("mb_logs." + std::to_string(getpid()));
  LogArchive archive_{directory_};
};

TEST_F(LogArchiveTest, RepeatedAndOverlappingChunksChangeNothing) {
  Append(0, "hello ");
  Append(0, "hello ");
  Append(3, "lo world");
  EXPECT_EQ(archive_.Size("j-1", 1, 0), 11);
  EXPECT_EQ(archive_.Read("j-1", 1, 0, 0, 100)->data, "hello world");
  EXPECT_EQ(archive_.Read("j-1", 1, 0, 6, 3)->data, "wor");
  EXPECT_EQ(archive_.Read("j-1", 1, 0, 11, 3)->data, "");
  EXPECT_EQ(archive_.Read("j-1", 2, 0, 0, 3)->data, "") << "no log yet";
}

TEST_F(LogArchiveTest, AGapIsTakenOnlyWhereTheAgentDroppedBytes) {
  Append(0, "start");
  Append(100'000, "lost", 0);
  EXPECT_EQ(archive_.Size("j-1", 1, 0), 5) << "the agent is told to go back";
  Append(100'000, "end", 99'995);
  const auto note = archive_.Read("j-1", 1, 0, 5, 1000);
  EXPECT_THAT(note->data, ::testing::HasSubstr("99995 bytes of this log were dropped"));
  const auto end = archive_.Read("j-1", 1, 0, note->offset + static_cast<int64_t>(note->data.size()), 1000);
  EXPECT_EQ(end->data, "end");
  EXPECT_EQ(end->offset, 100'000);
}

TEST(Names, AreFreshAndSortByTime) {
  const auto now = std::chrono::system_clock::now();
  EXPECT_LT(NewJobId(now), NewJobId(now + std::chrono::milliseconds(1)));
  EXPECT_EQ(NewJobId(now).size(), 14u);
  EXPECT_NE(NewRunName(), NewRunName());
  EXPECT_EQ(WhyNotARunName(NewRunName()), "");
  for (const char* bad : {"", "../x", "a/b", "a@1", "-a", "a b", "a\n"}) EXPECT_NE(WhyNotARunName(bad), "") << bad;
  EXPECT_NE(WhyNotARunName(std::string(64, 'a')), "");
}

TEST(Paths, StayBeneathTheirRoot) {
  EXPECT_TRUE(IsBeneath("/tmp/x/y", "/tmp/x"));
  EXPECT_TRUE(IsBeneath("/tmp/x", "/tmp/x/"));
  EXPECT_FALSE(IsBeneath("/tmp/xy", "/tmp/x"));
  EXPECT_FALSE(IsBeneath("/tmp/x/../y", "/tmp/x"));
  EXPECT_FALSE(IsBeneath("x/y", "/tmp/x"));
  EXPECT_FALSE(IsBeneath("", "/tmp/x"));
  EXPECT_FALSE(IsBeneath(std::string("/tmp/x/\0y", 9), "/tmp/x"));
  const auto base = std::filesystem::temp_directory_path() / ("mb_paths." + std::to_string(getpid()));
  std::filesystem::create_directories(base / "root");
  std::filesystem::create_symlink("/etc", base / "root" / "link");
  EXPECT_FALSE(IsBeneath((base / "root" / "link" / "x").string(), (base / "root").string()));
  std::filesystem::remove_all(base);
}

}  // namespace
}  // namespace mbridge::server
