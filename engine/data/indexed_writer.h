// Writes Megatron's IndexedDataset files.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/indexed_dataset.h"

namespace mbridge {

class DurableFile;

// Both files appear only in Finish(), complete and synced, the .idx last: a reader never sees half a set. Not thread-safe.
class IndexedWriter {
 public:
  // ALREADY_EXISTS where <prefix>.idx or .bin is there and `overwrite` is false. Missing folders are made.
  static absl::StatusOr<std::unique_ptr<IndexedWriter>> Create(const std::string& prefix, TokenType type, bool overwrite);
  ~IndexedWriter();

  // OUT_OF_RANGE where an id does not fit the type, or the set grows past 2^31 - 1 sequences.
  absl::Status AddSequence(std::span<const int32_t> tokens);
  // Ends a document: the sequences since the last call belong to it.
  void EndDocument();
  // Ends with the last EndDocument(); sequences after it are an error.
  absl::Status Finish();

  int64_t sequences() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t documents() const { return static_cast<int64_t>(document_begins_.size()) - 1; }
  int64_t tokens() const { return tokens_; }

 private:
  IndexedWriter() = default;

  std::string prefix_;
  TokenType type_ = TokenType::kInt32;
  std::unique_ptr<DurableFile> bin_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> document_begins_ = {0};
  std::vector<char> packed_;
  int64_t tokens_ = 0;
};

}  // namespace mbridge
