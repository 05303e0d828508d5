// mb_schema_docs flags|keys [FILE]: prints a table of the manual as Markdown, or writes it into FILE between the lines
// that begin with `<!-- flags: begin` and `<!-- flags: end`.
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "recipes/config/docs_table.h"

namespace {

// 0, or 1 with a message: no such file, no markers, not writable.
int UpdateFile(const std::string& path, const std::string& which, const std::string& table) {
  std::ifstream in(path);
  std::stringstream content;
  content << in.rdbuf();
  std::string page = content.str();
  const size_t begin = page.find("<!-- " + which + ": begin"), end = page.find("<!-- " + which + ": end");
  if (!in || begin == std::string::npos || end == std::string::npos || end < begin) {
    std::fprintf(stderr, "%s: cannot be read, or has no <!-- %s: begin --> and end lines\n", path.c_str(), which.c_str());
    return 1;
  }
  const size_t from = page.find('\n', begin) + 1;
  page.replace(from, end - from, "\n" + table);
  std::ofstream out(path);
  out << page;
  out.close();
  if (!out) std::fprintf(stderr, "%s: cannot be written\n", path.c_str());
  return out ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc >= 2 ? argv[1] : "";
  if (argc > 3 || (which != "flags" && which != "keys")) {
    std::fprintf(stderr, "usage: mb_schema_docs flags|keys [FILE]\n");
    return 2;
  }
  const std::string table = which == "flags" ? mbridge::recipes::FlagTableMarkdown() : mbridge::recipes::KeyTableMarkdown();
  if (argc == 3) return UpdateFile(argv[2], which, table);
  std::fputs(table.c_str(), stdout);
  return 0;
}
