#include "proto/rpc/posix_file.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

TEST(PosixFile, FaultsAreStatuses) {
  const absl::Status full = PosixStatus(ENOSPC, "cannot write /x");
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_EQ(ReasonOf(full), v1::REASON_DISK_FULL);
  EXPECT_EQ(std::string(full.message()), "cannot write /x: No space left on device");
  EXPECT_EQ(ReasonOf(PosixStatus(EDQUOT, "")), v1::REASON_DISK_FULL);
  EXPECT_TRUE(absl::IsNotFound(PosixStatus(ENOTDIR, "")));
  EXPECT_TRUE(absl::IsAlreadyExists(PosixStatus(ENOTEMPTY, "")));
  EXPECT_TRUE(absl::IsPermissionDenied(PosixStatus(EROFS, "")));
  EXPECT_TRUE(absl::IsUnavailable(PosixStatus(EIO, "")));
}

TEST(PosixFile, WritesAllThroughAPipe) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_TRUE(WriteToDescriptor(ends[1], "some bytes", "pipe").ok());
  char read_back[32];
  EXPECT_EQ(read(ends[0], read_back, sizeof(read_back)), 10);
  close(ends[1]);
  EXPECT_THAT(std::string(WriteToDescriptor(ends[0], "x", "/the/path").message()), testing::HasSubstr("cannot write /the/path"));
  close(ends[0]);
}

TEST(PosixFile, Folders) {
  EXPECT_EQ(FolderOf("/a/b/"), "/a");
  EXPECT_EQ(FolderOf("/a"), "/");
  EXPECT_EQ(FolderOf("/"), "/");
  EXPECT_EQ(FolderOf("a"), ".");
  EXPECT_TRUE(SyncFolder(testing::TempDir()).ok());
  EXPECT_TRUE(absl::IsNotFound(SyncFolder("/no/such/folder")));
}

}  // namespace
}  // namespace mbridge
