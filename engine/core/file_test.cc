#include "engine/core/file.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/core/failpoint.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

class FileTest : public testing::Test {
 protected:
  FileTest() {
    std::string pattern = testing::TempDir() + "file_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~FileTest() override {
    SetFailpoints("");
    std::filesystem::remove_all(directory_);
  }
  static void SetFailpoints(const char* text) {
    setenv("MB_FAILPOINTS", text, 1);
    ReloadFailpoints();
  }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  std::string directory_;
};

TEST_F(FileTest, WritesAndReadsBack) {
  auto writer = FileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Write("hello ").ok());
  ASSERT_TRUE(writer->Write("world").ok());
  EXPECT_EQ(writer->bytes_written(), 11);
  ASSERT_TRUE(writer->SyncAndClose().ok());
  EXPECT_EQ(ReadWholeFile(Path("a"), 100).value(), "hello world");
  EXPECT_EQ(FileWriter::Create(Path("a")).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadWholeFile(Path("a"), 10).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadWholeFile(Path("none"), 10).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ReadWholeFile(directory_, 10).ok());
  const auto reader = FileReader::Open(Path("a"));
  ASSERT_TRUE(reader.ok());
  char part[5];
  ASSERT_TRUE(reader->ReadAt(6, part, 5).ok());
  EXPECT_EQ(std::string(part, 5), "world");
  EXPECT_EQ(reader->ReadAt(7, part, 5).code(), absl::StatusCode::kDataLoss);
}

TEST_F(FileTest, ReplacesAtomicallyOrLeavesTheOldContent) {
  ASSERT_TRUE(WriteFileDurably(Path("a"), "old").ok());
  ASSERT_TRUE(WriteFileDurably(Path("a"), "new").ok());
  EXPECT_EQ(ReadWholeFile(Path("a"), 100).value(), "new");
  SetFailpoints("file.write=error:28");
  const absl::Status status = WriteFileDurably(Path("a"), "newer");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), v1::REASON_DISK_FULL);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(Path("a")));
  SetFailpoints("");
  EXPECT_EQ(ReadWholeFile(Path("a"), 100).value(), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), std::filesystem::directory_iterator()), 1);
}

TEST_F(FileTest, RenameNeverReplaces) {
  ASSERT_TRUE(WriteFileDurably(Path("a"), "a").ok());
  ASSERT_TRUE(WriteFileDurably(Path("b"), "b").ok());
  EXPECT_EQ(RenameDurably(Path("a"), Path("b")).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadWholeFile(Path("b"), 100).value(), "b");
  EXPECT_TRUE(RenameDurably(Path("a"), Path("c")).ok());
  EXPECT_EQ(RenameDurably(Path("a"), Path("d")).code(), absl::StatusCode::kNotFound);
}

TEST_F(FileTest, FoldersAndFreeSpace) {
  ASSERT_TRUE(MakeDirectories(Path("x/y/z")).ok());
  ASSERT_TRUE(MakeDirectories(Path("x/y/z")).ok());
  EXPECT_TRUE(std::filesystem::is_directory(Path("x/y/z")));
  ASSERT_TRUE(WriteFileDurably(Path("f"), "").ok());
  EXPECT_FALSE(MakeDirectories(Path("f/g")).ok());
  EXPECT_FALSE(MakeDirectories(Path("f")).ok());
  EXPECT_GT(FreeDiskBytes(directory_).value(), 0);
  EXPECT_FALSE(FreeDiskBytes(Path("none")).ok());
  EXPECT_TRUE(RemoveAll(Path("x")).ok());
  EXPECT_TRUE(RemoveAll(Path("x")).ok());
  EXPECT_EQ(ParentDirectory("/a/b/"), "/a");
  EXPECT_EQ(ParentDirectory("/a"), "/");
  EXPECT_EQ(ParentDirectory("a"), ".");
}

TEST_F(FileTest, FailpointsCountTheirPasses) {
  SetFailpoints("one=error:5@2;two=sleep:30;broken=what:1");
  EXPECT_EQ(MB_FAILPOINT("one"), 0);
  EXPECT_EQ(MB_FAILPOINT("one"), 5);
  EXPECT_EQ(MB_FAILPOINT("one"), 0);
  EXPECT_EQ(MB_FAILPOINT("other"), 0);
  EXPECT_EQ(MB_FAILPOINT("broken"), 0);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(MB_FAILPOINT("two"), 0);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
  const pid_t child = fork();
  if (child == 0) {
    SetFailpoints("three=kill");
    MB_FAILPOINT("three");
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

}  // namespace
}  // namespace mbridge
