// Megatron's IndexedDataset files: <prefix>.idx (header, lengths, offsets, documents) and <prefix>.bin (raw tokens).
// Source: megatron/core/datasets/indexed_dataset.py.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/mapped_file.h"
#include "engine/data/token_source.h"

namespace mbridge {

// The dtype codes of the .idx header.
enum class TokenType : uint8_t {
  kUint8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat64 = 6,
  kFloat32 = 7,
  kUint16 = 8
};
int64_t SizeOf(TokenType type);
std::string_view NameOf(TokenType type);  // "uint16"
// The preprocessing tool's choice: uint16 below 65500 ids, else int32.
TokenType TokenTypeFor(int64_t vocab_size);

// Smallest and largest stored id; min > max when there are no tokens.
struct IdRange {
  int64_t min = INT64_MAX;
  int64_t max = INT64_MIN;
};

// Memory-mapped reader. Thread-safe. Every number of the .idx is checked when it is opened, so that no later read can leave the
// files: counts against the file's size, lengths >= 0, each sequence inside the .bin, documents in order from 0 to the last.
class IndexedDataset : public TokenSource {
 public:
  // NOT_FOUND, or DATA_LOSS naming file, field, expected and found. Floating-point tokens are refused.
  static absl::StatusOr<std::shared_ptr<const IndexedDataset>> Open(const std::string& prefix);

  void Read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const override;
  const std::string& name() const override { return prefix_; }

  int64_t documents() const { return documents_; }
  // First sequence of document i, i in [0, documents()].
  int64_t document_begin(int64_t i) const;
  // Byte offset of a sequence in the .bin.
  int64_t pointer(int64_t sequence) const;
  int64_t tokens() const { return tokens_; }
  TokenType type() const { return type_; }
  const MappedFile& index_file() const { return *index_; }
  const MappedFile& token_file() const { return *bin_; }

  // Reads all tokens of sequences [begin, end) once.
  IdRange ScanIds(int64_t begin, int64_t end) const;
  // First sequence with an id outside [0, vocab_size), or -1. *id is that id.
  int64_t FindBadId(int64_t vocab_size, int64_t* id) const;
  // What a builder writes and training does not need: sequences back to back and the .bin exactly as long as they are.
  absl::Status CheckLayout() const;

 private:
  IndexedDataset() = default;
  absl::Status ParseHeader();
  absl::Status CheckDocuments() const;
  absl::Status CheckSequences();
  absl::Status BadField(std::string_view field, int64_t offset, const std::string& expected, const std::string& found) const;

  std::string prefix_;
  std::shared_ptr<const MappedFile> index_, bin_;
  TokenType type_ = TokenType::kInt32;
  int64_t documents_ = 0;
  int64_t tokens_ = 0;
  const unsigned char* pointers_ = nullptr;
  const unsigned char* document_begins_ = nullptr;
};

}  // namespace mbridge
