#include "engine/data/preprocess.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "engine/data/data_status.h"
#include "engine/data/indexed_writer.h"

namespace mbridge {
namespace {

TextFormat FormatOf(const PreprocessOptions& options, const std::string& path) {
  if (options.format != TextFormat::kAuto) return options.format;
  return path.ends_with(".jsonl") || path.ends_with(".json") ? TextFormat::kJsonLines : TextFormat::kParagraphs;
}

bool IsBlank(const std::string& line) { return line.find_first_not_of(" \t\r\n\v\f") == std::string::npos; }

class Preprocessor {
 public:
  Preprocessor(const PreprocessOptions& options, const Tokenizer& tokenizer, IndexedWriter* writer)
      : options_(options), tokenizer_(tokenizer), writer_(writer) {}

  absl::Status AddFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return DataNotFound(fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
    path_ = path;
    const TextFormat format = FormatOf(options_, path);
    std::string line, pending;
    int64_t first_line = 1;  // Of the pending document.
    for (line_ = 1; std::getline(file, line); ++line_) {
      if (format == TextFormat::kJsonLines) {
        if (!IsBlank(line)) MB_RETURN_IF_ERROR(AddJsonLine(line));
      } else if (format == TextFormat::kLines) {
        MB_RETURN_IF_ERROR(AddDocument(line));
      } else if (format == TextFormat::kParagraphs && IsBlank(line)) {
        if (!pending.empty()) MB_RETURN_IF_ERROR(AddDocument(pending));
        pending.clear();
      } else {
        if (pending.empty()) first_line = line_;
        pending += line;
        if (!file.eof()) pending += '\n';
      }
    }
    if (file.bad())
      return DataError(absl::StatusCode::kUnavailable, fmt::format("{}: read failed after line {}", path, line_ - 1));
    line_ = first_line;
    return pending.empty() ? absl::OkStatus() : AddDocument(pending);
  }

  PreprocessResult result() const { return {writer_->documents(), empty_, writer_->tokens(), text_bytes_}; }

 private:
  absl::Status Bad(const std::string& what) const {
    return DataError(absl::StatusCode::kInvalidArgument, fmt::format("{}: line {}: {}", path_, line_, what));
  }

  absl::Status AddJsonLine(const std::string& line) {
    nlohmann::json value;
    try {
      value = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& error) {
      return Bad(fmt::format("not JSON: {}", error.what()));
    }
    if (!value.is_object()) return Bad(fmt::format("expected a JSON object, found {}", value.type_name()));
    const auto text = value.find(options_.json_key);
    if (text == value.end())
      return Bad(fmt::format("the object has no key '{}'; name the text's key with --json-key", options_.json_key));
    if (!text->is_string())
      return Bad(fmt::format("key '{}': expected a string, found {}", options_.json_key, text->type_name()));
    return AddDocument(text->get_ref<const std::string&>());
  }

  absl::Status AddDocument(const std::string& text) {
    ids_.clear();
    if (auto status = tokenizer_.Encode(text, &ids_); !status.ok()) return Bad(std::string(status.message()));
    if (ids_.empty()) {
      ++empty_;
      return absl::OkStatus();
    }
    text_bytes_ += static_cast<int64_t>(text.size());
    if (options_.append_eod) ids_.push_back(tokenizer_.eod_id());
    MB_RETURN_IF_ERROR(writer_->AddSequence(ids_));
    writer_->EndDocument();
    return absl::OkStatus();
  }

  const PreprocessOptions& options_;
  const Tokenizer& tokenizer_;
  IndexedWriter* writer_;
  std::string path_;
  int64_t line_ = 0, empty_ = 0, text_bytes_ = 0;
  std::vector<int32_t> ids_;
};

}  // namespace

absl::StatusOr<PreprocessResult> PreprocessText(const PreprocessOptions& options, const Tokenizer& tokenizer) {
  if (options.inputs.empty()) return DataError(absl::StatusCode::kInvalidArgument, "no input file; give one or more");
  if (options.output_prefix.empty()) return DataError(absl::StatusCode::kInvalidArgument, "no output prefix");
  const TokenType type = options.token_type.value_or(TokenTypeFor(tokenizer.vocab_size()));
  MB_ASSIGN_OR_RETURN(auto writer, IndexedWriter::Create(options.output_prefix, type, options.overwrite));
  Preprocessor preprocessor(options, tokenizer, writer.get());
  for (const std::string& input : options.inputs) MB_RETURN_IF_ERROR(preprocessor.AddFile(input));
  const PreprocessResult result = preprocessor.result();
  if (result.documents == 0) {
    return DataError(absl::StatusCode::kInvalidArgument, fmt::format("{}: no document with text", options.inputs[0]));
  }
  MB_RETURN_IF_ERROR(writer->Finish());
  return result;
}

}  // namespace mbridge
