#include "engine/data/indexed_dataset.h"

#include <cstring>
#include <filesystem>
#include <random>

#include <gmock/gmock.h>

#include "engine/data/indexed_writer.h"
#include "engine/data/inspect.h"
#include "engine/data/test_support.h"
#include "proto/rpc/status_details.h"
#include "tests/fuzz/mutate.h"

namespace mbridge {
namespace {

using testing::HasSubstr;
using testing_data::MlmPath;
using testing_data::Oracle;
using testing_data::ReadAll;
using testing_data::Sha256Of;
using testing_data::TemporaryFolder;
using testing_data::WriteAll;

TEST(IndexedDatasetTest, ReadsMegatronsFiles) {
  for (const auto& [name, expected] : Oracle()["datasets"].items()) {
    SCOPED_TRACE(name);
    auto data = IndexedDataset::Open(MlmPath("blend/" + name));
    ASSERT_TRUE(data.ok()) << data.status();
    const IndexedDataset& set = **data;
    EXPECT_EQ(static_cast<int>(set.type()), expected["dtype_code"]);
    EXPECT_EQ(NameOf(set.type()), expected["dtype"]);
    EXPECT_EQ(set.sequences(), expected["sequence_count"]);
    EXPECT_EQ(set.documents() + 1, expected["document_indices_count"]);
    EXPECT_EQ(set.tokens(), expected["tokens"]);
    std::vector<int32_t> lengths;
    std::vector<int64_t> pointers, documents, all;
    for (int64_t i = 0; i <= set.documents(); ++i) documents.push_back(set.document_begin(i));
    for (int64_t i = 0; i < set.sequences(); ++i) {
      lengths.push_back(set.length(i));
      pointers.push_back(set.pointer(i));
      std::vector<int32_t> tokens(static_cast<size_t>(set.length(i)));
      set.Read(i, 0, set.length(i), tokens.data());
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
    EXPECT_EQ(Sha256Of(lengths), expected["sequence_lengths"]["sha256"]);
    EXPECT_EQ(Sha256Of(pointers), expected["sequence_pointers"]["sha256"]);
    EXPECT_EQ(Sha256Of(documents), expected["document_indices"]["sha256"]);
    EXPECT_EQ(Sha256Of(all), expected["all_tokens_int64_sha256"]);
    for (const auto& get : expected["get"]) {
      const int64_t sequence = get["sequence"], offset = get["offset"];
      const int64_t count = get["length"].is_null() ? set.length(sequence) - offset : get["length"].get<int64_t>();
      std::vector<int32_t> tokens(static_cast<size_t>(count));
      set.Read(sequence, offset, count, tokens.data());
      EXPECT_EQ(tokens, get["tokens"].get<std::vector<int32_t>>());
    }
    EXPECT_TRUE(VerifyData(MlmPath("blend/" + name), 32000).ok());
  }
}

// Sequences and documents of a set, written again, give the same two files.
TEST(IndexedWriterTest, WritesMegatronsBytes) {
  TemporaryFolder folder;
  for (const char* name : {"a", "b", "d"}) {
    const std::string original = MlmPath(std::string("blend/") + name), copy = folder / name;
    auto data = IndexedDataset::Open(original);
    ASSERT_TRUE(data.ok());
    auto writer = IndexedWriter::Create(copy, (*data)->type(), false);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (int64_t document = 0; document < (*data)->documents(); ++document) {
      for (int64_t i = (*data)->document_begin(document); i < (*data)->document_begin(document + 1); ++i) {
        std::vector<int32_t> tokens(static_cast<size_t>((*data)->length(i)));
        (*data)->Read(i, 0, (*data)->length(i), tokens.data());
        ASSERT_TRUE((*writer)->AddSequence(tokens).ok());
      }
      (*writer)->EndDocument();
    }
    EXPECT_FALSE(std::filesystem::exists(copy + ".idx"));
    ASSERT_TRUE((*writer)->Finish().ok());
    EXPECT_EQ(ReadAll(copy + ".idx"), ReadAll(original + ".idx"));
    EXPECT_EQ(ReadAll(copy + ".bin"), ReadAll(original + ".bin"));
  }
}

TEST(IndexedWriterTest, NothingAppearsBeforeFinish) {
  TemporaryFolder folder;
  {
    auto writer = IndexedWriter::Create(folder / "x", TokenType::kInt32, false);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->AddSequence(std::vector<int32_t>{1, 2, 3}).ok());
    EXPECT_EQ((*writer)->Finish().code(), absl::StatusCode::kFailedPrecondition);  // Document not ended.
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(IndexedWriterTest, Refusals) {
  TemporaryFolder folder;
  WriteAll(folder / "taken.bin", "precious");
  EXPECT_TRUE(absl::IsAlreadyExists(IndexedWriter::Create(folder / "taken", TokenType::kInt32, false).status()));
  EXPECT_EQ(ReadAll(folder / "taken.bin"), "precious");
  auto writer = IndexedWriter::Create(folder / "narrow", TokenType::kUint16, false);
  ASSERT_TRUE(writer.ok());
  for (int32_t id : {-1, 65536}) {
    const absl::Status status = (*writer)->AddSequence(std::vector<int32_t>{5, id});
    EXPECT_TRUE(absl::IsOutOfRange(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(id)));
  }
  EXPECT_FALSE(IndexedWriter::Create("/proc/nowhere/x", TokenType::kUint16, false).ok());
}

TEST(IndexedWriterTest, EveryIntegerTypeRoundTrips) {
  TemporaryFolder folder;
  for (TokenType type :
       {TokenType::kUint8, TokenType::kInt8, TokenType::kInt16, TokenType::kInt32, TokenType::kInt64, TokenType::kUint16}) {
    const std::string prefix = folder / std::string(NameOf(type));
    auto writer = IndexedWriter::Create(prefix, type, false);
    ASSERT_TRUE(writer.ok());
    const std::vector<int32_t> tokens = {0, 127, 5};
    ASSERT_TRUE((*writer)->AddSequence(tokens).ok());
    (*writer)->EndDocument();
    ASSERT_TRUE((*writer)->Finish().ok());
    auto data = IndexedDataset::Open(prefix);
    ASSERT_TRUE(data.ok());
    std::vector<int32_t> read(3);
    (*data)->Read(0, 0, 3, read.data());
    EXPECT_EQ(read, tokens);
    EXPECT_EQ((*data)->ScanIds(0, 1).max, 127);
    int64_t id = 0;
    EXPECT_EQ((*data)->FindBadId(128, &id), -1);
    EXPECT_EQ((*data)->FindBadId(127, &id), 0);
    EXPECT_EQ(id, 127);
  }
}

class DamageTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* extension : {".idx", ".bin"}) {
      std::filesystem::copy_file(MlmPath(std::string("blend/c") + extension), prefix_ + extension);
    }
    idx_ = ReadAll(prefix_ + ".idx");
    bin_ = ReadAll(prefix_ + ".bin");
  }

  // The error after writing `value` at `offset` of the .idx.
  template <class T> std::string After(size_t offset, T value) {
    std::string damaged = idx_;
    std::memcpy(damaged.data() + offset, &value, sizeof value);
    return ErrorOf(damaged);
  }
  std::string ErrorOf(const std::string& idx) {
    WriteAll(prefix_ + ".idx", idx);
    auto data = IndexedDataset::Open(prefix_);
    if (data.ok()) return "ok";
    EXPECT_TRUE(absl::IsDataLoss(data.status()));
    EXPECT_EQ(ReasonOf(data.status()), v1::REASON_DATA_ERROR);
    EXPECT_THAT(std::string(data.status().message()), HasSubstr(prefix_));
    return std::string(data.status().message());
  }

  TemporaryFolder folder_;
  std::string prefix_ = folder_ / "c";
  std::string idx_, bin_;
};

TEST_F(DamageTest, EachFieldIsNamedWithExpectedAndFound) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("file size (byte 0): expected at least 34"));
  EXPECT_THAT(After<char>(0, 'X'), HasSubstr("magic (byte 0): expected 4d4d49444944580000 (MMIDIDX), found 58"));
  EXPECT_THAT(After<uint64_t>(9, 2), HasSubstr("version (byte 9): expected 1, found 2"));
  EXPECT_THAT(After<uint8_t>(17, 9), HasSubstr("dtype code (byte 17): expected 1 to 8, found 9"));
  EXPECT_THAT(After<uint8_t>(17, 7), HasSubstr("found float32"));
  EXPECT_THAT(After<uint64_t>(18, UINT64_MAX), HasSubstr("sequence count (byte 18)"));
  EXPECT_THAT(After<uint64_t>(18, 13), HasSubstr("expected"));
  EXPECT_THAT(After<uint64_t>(26, 0), HasSubstr("document boundary count (byte 26)"));
  EXPECT_THAT(After<uint64_t>(26, 12), HasSubstr("file size (byte 0): expected 274 bytes, by its counts, found 282"));
  EXPECT_THAT(After<int32_t>(34 + 4 * 3, -1), HasSubstr("length of sequence 3 (byte 46): expected 0 or more, found -1"));
  EXPECT_THAT(After<int32_t>(34 + 4 * 3, 1 << 30), HasSubstr("c.bin: sequence 3 of 12"));
  EXPECT_THAT(After<int64_t>(34 + 48 + 8 * 2, -8), HasSubstr("offset of sequence 2"));
  EXPECT_THAT(After<int64_t>(34 + 48 + 8 * 2, INT64_MAX), HasSubstr("offset of sequence 2"));
  EXPECT_THAT(After<int64_t>(34 + 144, 1), HasSubstr("document boundary 0 (byte 178): expected 0, found 1"));
  EXPECT_THAT(After<int64_t>(34 + 144 + 8 * 5, -3), HasSubstr("document boundary 5"));
  EXPECT_THAT(After<int64_t>(34 + 144 + 8 * 12, 99), HasSubstr("last document boundary"));
  EXPECT_EQ(ErrorOf(idx_), "ok");
}

TEST_F(DamageTest, TruncatedTokens) {
  WriteAll(prefix_ + ".bin", bin_.substr(0, bin_.size() - 2));
  EXPECT_THAT(ErrorOf(idx_), HasSubstr("c.bin: sequence 11 of 12: expected"));
  WriteAll(prefix_ + ".bin", "");
  EXPECT_THAT(ErrorOf(idx_), HasSubstr("c.bin: "));
  std::filesystem::remove(prefix_ + ".bin");
  EXPECT_TRUE(absl::IsNotFound(IndexedDataset::Open(prefix_).status()));
}

TEST_F(DamageTest, VerifyFindsWhatTrainingWouldAccept) {
  EXPECT_TRUE(VerifyData(prefix_, 32000).ok());
  EXPECT_TRUE(absl::IsOutOfRange(VerifyData(prefix_, 31999)));
  WriteAll(prefix_ + ".bin", bin_ + "xx");
  EXPECT_EQ(ErrorOf(idx_), "ok");
  const absl::Status longer = VerifyData(prefix_, 32000);
  EXPECT_THAT(std::string(longer.message()), HasSubstr("file size: expected 4234 bytes, by its .idx, found 4236"));
  WriteAll(prefix_ + ".bin", bin_);
  EXPECT_EQ(After<int64_t>(34 + 48 + 8, 0), "ok");  // Second sequence on top of the first.
  EXPECT_THAT(std::string(VerifyData(prefix_, 32000).message()), HasSubstr("offset of sequence 1"));
}

// Random damage ends in an error or in a set that can be read from end to end.
TEST_F(DamageTest, RandomDamageNeverCrashes) {
  std::mt19937 random(20240607);
  int refused = 0, accepted = 0;
  for (int round = 0; round < fuzz::Rounds(1500); ++round) {
    std::string idx = idx_, bin = bin_;
    std::string& target = random() % 4 == 0 ? bin : idx;
    const int flips = static_cast<int>(random() % 4);
    for (int i = 0; i < flips; ++i)
      target[random() % std::min<size_t>(target.size(), 400)] ^= static_cast<char>(1 << random() % 8);
    if (random() % 3 == 0) target.resize(random() % (target.size() + 1));
    if (random() % 16 == 0) target.append(random() % 64, '\x7f');
    WriteAll(prefix_ + ".idx", idx);
    WriteAll(prefix_ + ".bin", bin);
    auto data = IndexedDataset::Open(prefix_);
    VerifyData(prefix_, 32000).IgnoreError();
    if (!data.ok()) {
      ++refused;
      continue;
    }
    ++accepted;
    for (int64_t i = 0; i < (*data)->sequences(); ++i) {
      std::vector<int32_t> tokens(static_cast<size_t>((*data)->length(i)));
      (*data)->Read(i, 0, (*data)->length(i), tokens.data());
    }
    (*data)->ScanIds(0, (*data)->sequences());
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(accepted, 300);
}

}  // namespace
}  // namespace mbridge
