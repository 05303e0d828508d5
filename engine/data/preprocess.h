// Text to a Megatron data set: what `mbctl data preprocess` does (tools/preprocess_data.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/indexed_dataset.h"
#include "engine/data/tokenizer.h"

namespace mbridge {

enum class TextFormat {
  kAuto,        // .jsonl and .json files are JSON lines, others plain text in paragraphs.
  kJsonLines,   // One JSON object a line; its `key` is a document.
  kLines,       // Each line is a document.
  kParagraphs,  // Blank lines end a document.
  kWholeFile,   // Each file is a document.
};

struct PreprocessOptions {
  std::vector<std::string> inputs;  // Read in this order.
  std::string output_prefix;        // Writes <output_prefix>.bin and .idx.
  TextFormat format = TextFormat::kAuto;
  std::string json_key = "text";
  bool append_eod = true;  // An end-of-document token after each document that has tokens.
  bool overwrite = false;
  // Default: uint16 below 65500 ids, else int32.
  std::optional<TokenType> token_type = std::nullopt;
};

struct PreprocessResult {
  int64_t documents = 0;  // Written, one sequence each.
  int64_t empty = 0;      // Left out: no text.
  int64_t tokens = 0;     // Written, eod included.
  int64_t text_bytes = 0;
};

// Nothing appears under the output prefix unless everything was read. Errors name the file and line: NOT_FOUND (input),
// INVALID_ARGUMENT (bad JSON, key missing or not a string, no document at all), ALREADY_EXISTS (output).
absl::StatusOr<PreprocessResult> PreprocessText(const PreprocessOptions& options, const Tokenizer& tokenizer);

}  // namespace mbridge
