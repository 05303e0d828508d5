#include "worker/spool/file.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mbridge/v1/rank.pb.h"
#include "proto/rpc/status_details.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/rendezvous_directory.h"

namespace mbridge::spool {
namespace {

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "file_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) names.push_back(entry.path().filename());
    return names;
  }

  std::string directory_;
};

TEST_F(FileTest, ReplacesAtomicallyAndLeavesNoTemporaryFile) {
  const std::string path = directory_ + "/x";
  ASSERT_TRUE(WriteFileAtomically(path, "one").ok());
  ASSERT_TRUE(WriteFileAtomically(path, "two").ok());
  ASSERT_TRUE(ReplaceFile(path, "three").ok());
  EXPECT_EQ(*ReadFile(path), "three");
  EXPECT_THAT(Names(), testing::ElementsAre("x"));
}

TEST_F(FileTest, ExclusiveWriteHasOneWinner) {
  const std::string path = directory_ + "/x";
  ASSERT_TRUE(WriteFileExclusively(path, "one").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(WriteFileExclusively(path, "two")));
  EXPECT_EQ(*ReadFile(path), "one");
  EXPECT_THAT(Names(), testing::ElementsAre("x"));
}

TEST_F(FileTest, ErrorsNameThePath) {
  const absl::Status missing = ReadFile(directory_ + "/none").status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(std::string(missing.message()), testing::HasSubstr("/none"));
  EXPECT_TRUE(absl::IsNotFound(WriteFileAtomically(directory_ + "/none/x", "")));
  ASSERT_TRUE(ReplaceFile(directory_ + "/large", std::string(100, 'x')).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ReadFile(directory_ + "/large", 99).status()));
  EXPECT_EQ(ReasonOf(ErrnoStatus(ENOSPC, "x")), v1::REASON_DISK_FULL);
}

TEST_F(FileTest, ProtoRoundTripAndDamage) {
  v1::ExitRecord record;
  record.set_signal(9);
  const std::string path = directory_ + "/rank-0.exit";
  ASSERT_TRUE(WriteProto(path, record).ok());
  v1::ExitRecord back;
  ASSERT_TRUE(ReadProto(path, &back).ok());
  EXPECT_EQ(back.signal(), 9);
  ASSERT_TRUE(ReplaceFile(path, "\xff\xff").ok());
  EXPECT_TRUE(absl::IsDataLoss(ReadProto(path, &back)));
}

TEST_F(FileTest, AttemptDirectoryListsItsRanks) {
  const AttemptDirectory attempt(directory_);
  for (const int rank : {10, 2}) ASSERT_TRUE(ReplaceFile(attempt.SpecPath(rank), "").ok());
  ASSERT_TRUE(ReplaceFile(attempt.LogPath(3), "").ok());
  ASSERT_TRUE(ReplaceFile(directory_ + "/rank-x.spec", "").ok());
  EXPECT_THAT(attempt.Ranks(), testing::ElementsAre(2, 10));
}

TEST_F(FileTest, RendezvousKeepsAnyKeyAndSkipsTemporaryFiles) {
  auto rendezvous = RendezvousDirectory::Open(directory_ + "/rdzv");
  ASSERT_TRUE(rendezvous.ok());
  const std::string odd("rank/0:\0\xfe..%2F", 14);
  EXPECT_FALSE(rendezvous->Get(odd)->has_value());
  ASSERT_TRUE(rendezvous->Set(odd, "v").ok());
  ASSERT_TRUE(rendezvous->Set("plain_key-1", std::string("\0b", 2)).ok());
  EXPECT_EQ(**rendezvous->Get(odd), "v");
  EXPECT_EQ(**rendezvous->Get("plain_key-1"), std::string("\0b", 2));
  ASSERT_TRUE(ReplaceFile(directory_ + "/rdzv/.tmp-x-1-1", "").ok());
  EXPECT_THAT(*rendezvous->Keys(), testing::UnorderedElementsAre(odd, "plain_key-1"));
  EXPECT_TRUE(absl::IsInvalidArgument(rendezvous->Set("", "v")));
  EXPECT_TRUE(absl::IsInvalidArgument(rendezvous->Set(std::string(300, 'k'), "v")));
}

}  // namespace
}  // namespace mbridge::spool
