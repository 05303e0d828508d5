#include "engine/data/tokenizer.h"

#include <charconv>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {
namespace {

absl::Status OutsideVocabulary(int64_t id, int64_t vocab_size) {
  return DataError(absl::StatusCode::kOutOfRange, fmt::format("token id {}: must lie in 0 to {}", id, vocab_size - 1));
}

}  // namespace

absl::Status NullTokenizer::Encode(std::string_view text, std::vector<int32_t>* ids) const {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  for (size_t at = text.find_first_not_of(kSpace); at != std::string_view::npos; at = text.find_first_not_of(kSpace, at)) {
    size_t end = text.find_first_of(kSpace, at);
    if (end == std::string_view::npos) end = text.size();
    const std::string_view word = text.substr(at, end - at);
    int64_t id = 0;
    const auto result = std::from_chars(word.data(), word.data() + word.size(), id);
    if (result.ec != std::errc() || result.ptr != word.data() + word.size()) {
      return DataError(
          absl::StatusCode::kInvalidArgument,
          fmt::format("'{}' is not a token id; NullTokenizer reads white-space separated numbers", word.substr(0, 40)));
    }
    if (id < 0 || id >= vocab_size_) return OutsideVocabulary(id, vocab_size_);
    ids->push_back(static_cast<int32_t>(id));
    at = end;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> NullTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) return OutsideVocabulary(id, vocab_size_);
    if (id == eod_id()) continue;
    text += fmt::format("{}{}", text.empty() ? "" : " ", id);
  }
  return text;
}

std::vector<std::pair<std::string, std::optional<std::string>>> NullTokenizer::identifiers() const {
  return {{"class", "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"},
          {"tokenizer_path", std::nullopt},
          {"vocab_size", fmt::format("{}", vocab_size_)}};
}

absl::Status ByteTokenizer::Encode(std::string_view text, std::vector<int32_t>* ids) const {
  ids->reserve(ids->size() + text.size());
  for (char c : text) ids->push_back(static_cast<unsigned char>(c));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ByteTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) return OutsideVocabulary(id, vocab_size());
    if (id != eod_id()) text += static_cast<char>(id);
  }
  return text;
}

std::vector<std::pair<std::string, std::optional<std::string>>> ByteTokenizer::identifiers() const {
  return {{"class", "mbridge.ByteTokenizer"}, {"tokenizer_path", std::nullopt}};
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(const std::string& type, int64_t vocab_size) {
  if (type == "ByteLevelTokenizer") return std::make_unique<ByteTokenizer>();
  if (type != "NullTokenizer") {
    return InvalidDataSetting("tokenizer.tokenizer_type", fmt::format("'{}': must be NullTokenizer or ByteLevelTokenizer", type));
  }
  if (vocab_size < 2 || vocab_size > INT32_MAX) {
    return InvalidDataSetting("tokenizer.vocab_size", fmt::format("{}: must lie in 2 to 2147483647", vocab_size));
  }
  return std::make_unique<NullTokenizer>(vocab_size);
}

}  // namespace mbridge
