#include "engine/checkpoint/streamed_checkpoint.h"

#include <filesystem>

#include "engine/checkpoint/checkpoint_test_support.h"

namespace mbridge {
namespace {

std::vector<StreamedCheckpoint::Entry> SampleEntries() {
  return {{"a", DType::kBF16, {5}}, {"b", DType::kF32, {3, 4}}, {"c", DType::kF32, {100}}, {"d", DType::kBF16, {7, 2}}};
}

CheckpointMeta FirstStep() {
  CheckpointMeta meta;
  meta.step = 1;
  return meta;
}

std::vector<char> BytesOf(const StreamedCheckpoint::Entry& entry) {
  std::vector<char> bytes(static_cast<size_t>(entry.bytes()));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(entry.name[0] + static_cast<char>(i % 50));
  return bytes;
}

// Writes at most `most` tensors; the names that were written.
std::string WriteSome(StreamedCheckpoint* checkpoint, int most) {
  std::string names;
  for (int i = 0; i < most && checkpoint->next() >= 0; ++i) {
    const auto& entry = checkpoint->entry(checkpoint->next());
    names += entry.name;
    const absl::Status written = checkpoint->Write(BytesOf(entry).data());
    EXPECT_TRUE(written.ok()) << written;
  }
  return names;
}

TEST_F(CheckpointTest, StreamedCheckpointIsReadLikeAnyOther) {
  auto opened = StreamedCheckpoint::Open({.path = Step(1), .fingerprint = "x"}, FirstStep(), SampleEntries());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(WriteSome(&*opened, 10), "bcad") << "wide elements first";
  const auto saved = opened->Commit();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(SampleEntries().size(), static_cast<size_t>(saved->tensors));
  const auto verified = VerifyCheckpoint(Step(1), saved->manifest_hash);
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->bytes, saved->bytes);

  std::vector<float> b(12);
  std::vector<uint16_t> a(5), d(14);
  std::vector<float> c(100);
  const auto target = [](const char* name, DType dtype, Shape shape, void* data) {
    return CheckpointTensor{
        .name = name, .global_shape = shape, .shard_shape = shape, .tensor = {data, dtype, DeviceType::kCpu, shape}};
  };
  const auto meta = LoadCheckpoint(Step(1), {.expected_manifest_hash = "", .weights_only = true},
                                   {target("a", DType::kBF16, {5}, a.data()), target("b", DType::kF32, {3, 4}, b.data()),
                                    target("c", DType::kF32, {100}, c.data()), target("d", DType::kBF16, {7, 2}, d.data())},
                                   self_.get());
  ASSERT_TRUE(meta.ok()) << meta.status();
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the same bits.
  EXPECT_EQ(0, std::memcmp(b.data(), BytesOf(SampleEntries()[1]).data(), 48));
  EXPECT_EQ(0, std::memcmp(d.data(), BytesOf(SampleEntries()[3]).data(), 28));
}

TEST_F(CheckpointTest, StreamedCheckpointGoesOnAfterItsFinishedFiles) {
  const StreamedCheckpoint::Options options{.path = Step(1), .fingerprint = "x", .file_bytes = 40};
  {
    auto opened = StreamedCheckpoint::Open(options, FirstStep(), SampleEntries());
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(WriteSome(&*opened, 3), "bac") << "[a b] and [c] are files, d is missing";
  }
  EXPECT_FALSE(std::filesystem::exists(Step(1)));
  {
    auto opened = StreamedCheckpoint::Open(options, FirstStep(), SampleEntries());
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->tensors_taken_over(), 3);
    EXPECT_EQ(WriteSome(&*opened, 10), "d");
    ASSERT_TRUE(opened->Commit().ok());
  }
  EXPECT_TRUE(VerifyCheckpoint(Step(1)).ok());
  EXPECT_EQ(Entries(), std::vector<std::string>{"step_00000001"}) << "nothing is left beside it";
  const auto again = StreamedCheckpoint::Open(options, FirstStep(), SampleEntries());
  EXPECT_TRUE(absl::IsAlreadyExists(again.status())) << again.status();
}

TEST_F(CheckpointTest, StreamedCheckpointOfAnotherSourceStartsAnew) {
  StreamedCheckpoint::Options options{.path = Step(1), .fingerprint = "x", .file_bytes = 40};
  auto first = StreamedCheckpoint::Open(options, FirstStep(), SampleEntries());
  ASSERT_TRUE(first.ok()) << first.status();
  WriteSome(&*first, 3);
  options.fingerprint = "y";
  auto second = StreamedCheckpoint::Open(options, FirstStep(), SampleEntries());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->tensors_taken_over(), 0);
  EXPECT_FALSE(second->Commit().ok()) << "not all is written";
  ASSERT_TRUE(second->Abandon().ok());
  EXPECT_TRUE(Entries().empty());
}

TEST_F(CheckpointTest, StreamedCheckpointLeavesNothingFinishedAfterAFullDisk) {
  auto opened = StreamedCheckpoint::Open({.path = Step(1), .fingerprint = "x"}, FirstStep(), SampleEntries());
  ASSERT_TRUE(opened.ok()) << opened.status();
  SetFailpoints("file.write=error:28");
  const absl::Status written = opened->Write(BytesOf(opened->entry(opened->next())).data());
  EXPECT_EQ(ReasonOf(written), v1::REASON_DISK_FULL) << written;
  SetFailpoints("");
  EXPECT_FALSE(std::filesystem::exists(Step(1)));
}

}  // namespace
}  // namespace mbridge
