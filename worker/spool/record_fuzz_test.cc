// Damaged spools: readers come to the end and return written records only; a writer goes on behind them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "tests/fuzz/mutate.h"
#include "worker/spool/record_file.h"

namespace mbridge::spool {
namespace {

TEST(RecordFuzz, ADamagedSpoolGivesWrittenRecordsOnly) {
  std::string directory = testing::TempDir() + "record_fuzz_XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  const std::string path = directory + "/events.spool";
  std::set<std::string> written;
  for (auto writer = *RecordWriter::Open(path); written.size() < 20;) {
    v1::RankRecord record;
    record.set_message("record " + std::to_string(written.size()));
    ASSERT_TRUE(writer->Append(record).ok());
    written.insert(record.message());
  }
  std::ifstream file(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(file)), {});

  fuzz::Mutator mutate(5);
  for (int i = 0; i < fuzz::Rounds(200); ++i) {
    const std::string damaged = mutate(whole);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    auto reader = RecordReader::Open(path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    for (size_t turns = 0;; ++turns) {
      ASSERT_LE(turns, damaged.size()) << "the reader does not come to an end";
      const auto record = (*reader)->Next();
      if (!record.ok()) {
        ASSERT_TRUE(absl::IsDataLoss(record.status())) << record.status();
        continue;
      }
      if (!record->has_value()) break;
      ASSERT_TRUE(written.contains((*record)->message())) << (*record)->ShortDebugString();
    }
    auto writer = RecordWriter::Open(path);
    ASSERT_TRUE(writer.ok() || absl::IsDataLoss(writer.status())) << writer.status();
    if (!writer.ok()) continue;
    v1::RankRecord next;
    next.set_message("record 0");
    ASSERT_TRUE((*writer)->Append(next).ok());
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace mbridge::spool
