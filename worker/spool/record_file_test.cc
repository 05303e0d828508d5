#include "worker/spool/record_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::spool {
namespace {

v1::RankRecord Message(const std::string& text) {
  v1::RankRecord record;
  record.set_message(text);
  return record;
}

class RecordFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "record_file_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/events.spool";
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::unique_ptr<RecordWriter> OpenWriter() {
    auto writer = RecordWriter::Open(path_);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  }

  // "sequence:text" of each record; "!" for DATA_LOSS.
  std::vector<std::string> ReadAll(uint64_t offset = 0) {
    std::vector<std::string> all;
    auto reader = RecordReader::Open(path_, offset);
    EXPECT_TRUE(reader.ok()) << reader.status();
    while (true) {
      auto record = (*reader)->Next();
      if (!record.ok()) {
        EXPECT_TRUE(absl::IsDataLoss(record.status())) << record.status();
        all.push_back("!");
        continue;
      }
      if (!record->has_value()) return all;
      all.push_back(std::to_string((*record)->sequence()) + ":" + (*record)->message());
    }
  }

  std::string Bytes() { return *ReadFile(path_); }
  void SetBytes(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  std::string directory_;
  std::string path_;
};

TEST_F(RecordFileTest, ReadsWhatWasWrittenAndNumbersIt) {
  auto writer = OpenWriter();
  ASSERT_TRUE(writer->Append(Message("a")).ok());
  v1::RankRecord stamped = Message("b");
  stamped.set_sequence(77);  // Not the caller's to choose.
  stamped.mutable_time()->set_seconds(5);
  ASSERT_TRUE(writer->Append(stamped).ok());
  EXPECT_THAT(ReadAll(), testing::ElementsAre("1:a", "2:b"));
  auto reader = RecordReader::Open(path_);
  EXPECT_GT((*(*reader)->Next())->time().seconds(), 1'000'000'000);
  EXPECT_EQ((*(*reader)->Next())->time().seconds(), 5);
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(RecordFileTest, ReaderFollowsAWriterAndResumesAtItsOffset) {
  EXPECT_TRUE(absl::IsNotFound(RecordReader::Open(path_).status()));
  auto writer = OpenWriter();
  auto reader = RecordReader::Open(path_);
  ASSERT_TRUE(reader.ok());
  EXPECT_FALSE((*reader)->Next()->has_value());
  ASSERT_TRUE(writer->Append(Message("a")).ok());
  EXPECT_EQ((*(*reader)->Next())->message(), "a");
  EXPECT_FALSE((*reader)->Next()->has_value());
  const uint64_t offset = (*reader)->offset();
  ASSERT_TRUE(writer->Append(Message("b")).ok());
  EXPECT_THAT(ReadAll(offset), testing::ElementsAre("2:b"));
}

TEST_F(RecordFileTest, ATornTailAtEveryByteCostsNoEarlierRecordAndTheNextWriterGoesOn) {
  {
    auto writer = OpenWriter();
    ASSERT_TRUE(writer->Append(Message("first")).ok());
    ASSERT_TRUE(writer->Append(Message("second")).ok());
  }
  const std::string whole = Bytes();
  auto reader = RecordReader::Open(path_);
  ASSERT_TRUE((*reader)->Next().ok());
  const size_t second = (*reader)->offset();
  for (size_t size = second; size < whole.size(); ++size) {
    SetBytes(whole.substr(0, size));
    ASSERT_THAT(ReadAll(), testing::ElementsAre("1:first")) << size;
    auto writer = OpenWriter();
    ASSERT_EQ(writer->last_sequence(), 1u) << size;
    ASSERT_TRUE(writer->Append(Message("again")).ok());
    ASSERT_THAT(ReadAll(), testing::ElementsAre("1:first", "2:again")) << size;
  }
}

TEST_F(RecordFileTest, AFlippedBitAnywhereInTheMiddleIsReportedAndTheRestIsRead) {
  {
    auto writer = OpenWriter();
    for (const char* text : {"first", "second", "third"}) ASSERT_TRUE(writer->Append(Message(text)).ok());
  }
  const std::string whole = Bytes();
  auto reader = RecordReader::Open(path_);
  ASSERT_TRUE((*reader)->Next().ok());
  const size_t begin = (*reader)->offset();
  ASSERT_TRUE((*reader)->Next().ok());
  const size_t end = (*reader)->offset();
  for (size_t bit = begin * 8; bit < end * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    SetBytes(damaged);
    ASSERT_THAT(ReadAll(), testing::ElementsAre("1:first", "!", "3:third")) << "bit " << bit;
  }
  // A writer keeps what lies behind the damage.
  auto writer = OpenWriter();
  ASSERT_TRUE(writer->Append(Message("fourth")).ok());
  EXPECT_THAT(ReadAll(), testing::ElementsAre("1:first", "!", "3:third", "4:fourth"));
}

TEST_F(RecordFileTest, DamageNamesItsOffset) {
  auto writer = OpenWriter();
  ASSERT_TRUE(writer->Append(Message("a")).ok());
  std::string bytes = Bytes();
  const size_t first = bytes.size();
  ASSERT_TRUE(writer->Append(Message("b")).ok());
  bytes = Bytes();
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  SetBytes(bytes);
  auto reader = RecordReader::Open(path_);
  ASSERT_TRUE((*reader)->Next().ok());
  const auto damaged = (*reader)->Next();
  ASSERT_TRUE(absl::IsDataLoss(damaged.status()));
  EXPECT_THAT(std::string(damaged.status().message()), testing::HasSubstr("from " + std::to_string(first) + " on"));
  EXPECT_FALSE((*reader)->Next()->has_value());  // Once is enough.
}

TEST_F(RecordFileTest, ATailOfZerosFromAPowerCutIsRemovedByTheNextWriter) {
  { ASSERT_TRUE(OpenWriter()->Append(Message("a")).ok()); }
  const std::string whole = Bytes();
  SetBytes(whole + std::string(100, '\0'));
  auto writer = OpenWriter();
  ASSERT_TRUE(writer->Append(Message("b")).ok());
  EXPECT_THAT(ReadAll(), testing::ElementsAre("1:a", "2:b"));
}

TEST_F(RecordFileTest, OneWriterAtATime) {
  auto writer = OpenWriter();
  EXPECT_TRUE(absl::IsFailedPrecondition(RecordWriter::Open(path_).status()));
  writer.reset();
  EXPECT_TRUE(RecordWriter::Open(path_).ok());
}

TEST_F(RecordFileTest, RefusesARecordThatIsTooLargeAndStaysUsable) {
  auto writer = OpenWriter();
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Append(Message(std::string(kMaxRecordBytes + 1, 'x')))));
  EXPECT_EQ(writer->dropped(), 1);
  ASSERT_TRUE(writer->Append(Message("b")).ok());
  EXPECT_EQ(writer->dropped(), 0);
  EXPECT_EQ(ReadAll().size(), 2u);
}

// Runs in a child process, for the limit holds for the whole process.
TEST_F(RecordFileTest, AFullDiskDropsRecordsTellsAndRecovers) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    auto writer = RecordWriter::Open(path_);
    bool good = writer.ok() && (*writer)->Append(Message("a")).ok();
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = std::filesystem::file_size(path_) + 20;  // In the middle of the next record.
    ::setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 0; i < 3; ++i) {
      const absl::Status full = (*writer)->Append(Message("lost"));
      good = good && absl::IsResourceExhausted(full) && ReasonOf(full) == v1::REASON_DISK_FULL;
    }
    good = good && (*writer)->dropped() == 3;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    good = good && (*writer)->Append(Message("b")).ok();
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
  EXPECT_THAT(ReadAll(), testing::ElementsAre("1:a", testing::StartsWith("2:3 records were not written"), "3:b"));
}

}  // namespace
}  // namespace mbridge::spool
