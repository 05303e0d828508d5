// Text to token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge {

// Immutable and thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Number of ids, the special ones included.
  virtual int64_t vocab_size() const = 0;
  virtual int32_t eod_id() const = 0;
  virtual int32_t pad_id() const { return -1; }  // -1: none.
  // Appends the ids of `text` to *ids, without special tokens.
  virtual absl::Status Encode(std::string_view text, std::vector<int32_t>* ids) const = 0;
  // Special tokens are left out; an id outside the vocabulary is OUT_OF_RANGE.
  virtual absl::StatusOr<std::string> Decode(std::span<const int32_t> ids) const = 0;
  // The tokenizer's part of Megatron-LM's index descriptions (GptDataConfig::tokenizer_identifiers).
  virtual std::vector<std::pair<std::string, std::optional<std::string>>> identifiers() const = 0;
};

// Text is white-space separated ids; the last id of the vocabulary is end-of-document. Megatron-LM's NullTokenizer.
class NullTokenizer : public Tokenizer {
 public:
  explicit NullTokenizer(int64_t vocab_size) : vocab_size_(vocab_size) {}
  int64_t vocab_size() const override { return vocab_size_; }
  int32_t eod_id() const override { return static_cast<int32_t>(vocab_size_ - 1); }
  absl::Status Encode(std::string_view text, std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids) const override;
  std::vector<std::pair<std::string, std::optional<std::string>>> identifiers() const override;

 private:
  int64_t vocab_size_;
};

// Id = byte, 256 = end of document.
class ByteTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 257; }
  int32_t eod_id() const override { return 256; }
  absl::Status Encode(std::string_view text, std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(std::span<const int32_t> ids) const override;
  std::vector<std::pair<std::string, std::optional<std::string>>> identifiers() const override;
};

// `type` is a value of tokenizer.tokenizer_type: NullTokenizer (needs vocab_size >= 2) or ByteLevelTokenizer. Others are
// INVALID_ARGUMENT with the list.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(const std::string& type, int64_t vocab_size);

}  // namespace mbridge
