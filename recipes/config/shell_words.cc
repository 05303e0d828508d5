#include "recipes/config/translate.h"

namespace mbridge::recipes {

absl::StatusOr<std::vector<std::string>> SplitShellWords(const std::string& line) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false;
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote == '\'' || (quote == '"' && c != '\\')) {
      if (c == quote) {
        quote = 0;
      } else {
        word += c;
      }
    } else if (c == '\\' && i + 1 < line.size()) {
      const char next = line[++i];
      const bool escapes = quote == 0 || next == '"' || next == '\\' || next == '$' || next == '`' || next == '\n';
      if (!escapes) word += '\\';
      if (next == '\r' && i + 1 < line.size() && line[i + 1] == '\n') {
        ++i;
      } else if (next != '\n') {
        word += next;
        in_word = true;
      }
    } else if (c == '\'' || c == '"') {
      quote = c;
      in_word = true;
    } else if (c == '#' && !in_word) {
      while (i + 1 < line.size() && line[i + 1] != '\n') ++i;
    } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
      if (in_word) words.push_back(std::exchange(word, ""));
      in_word = false;
    } else {
      word += c;
      in_word = true;
    }
  }
  if (quote != 0) return absl::InvalidArgumentError(std::string("the closing ") + quote + " is missing");
  if (in_word) words.push_back(word);
  return words;
}

}  // namespace mbridge::recipes
