// The fixtures of tests/data/hf_fixtures.tar.xz that the engine builds, and the table of docs/models.md: it says what the tests
// saw of each, and a test that sees something else fails. `bash tests/models_table.sh` writes the table anew.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace mbridge {

// One line a fixture: one of each family, and a few more.
inline const std::vector<std::string>& FamilyFixtures() {
  static const std::vector<std::string> kFixtures = {
      "llama_untied",       //
      "llama_tied_rope3",   //
      "llama_bias",         //
      "mistral",            //
      "qwen2",              //
      "qwen3",              //
      "mixtral",            //
      "qwen2_moe",          //
      "qwen3_moe",          //
      "qwen3_next",         //
      "gpt2",               //
      "phi3",               //
      "olmo2",              //
      "gemma",              //
      "gemma2",             //
      "gemma3",             //
      "glm4",               //
      "nemotron",           //
      "granite",            //
      "starcoder2",         //
      "exaone4",            //
      "ernie4_5",           //
      "deepseek_v2_lite",   //
      "deepseek_v2_group",  //
      "deepseek_v3",        //
      "gpt_oss",            //
      "glm4_moe",           //
      "minimax_m2",         //
      "mamba2",             //
      "falcon_h1",          //
      "nemotron_h",         //
  };
  return kFixtures;
}

// By fixture and column, what the document says.
inline std::map<std::string, std::map<std::string, std::string>> DocumentedFamilies() {
  std::map<std::string, std::map<std::string, std::string>> table;
  std::vector<std::string> columns;
  std::ifstream document(std::string(MB_SOURCE_DIR) + "/docs/models.md");
  for (std::string line; std::getline(document, line);) {
    std::vector<std::string> cells;
    std::istringstream text(line);
    for (std::string cell; std::getline(text, cell, '|');) {
      const size_t begin = cell.find_first_not_of(" `"), end = cell.find_last_not_of(" `");
      cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
    }
    if (cells.size() < 4 || !cells[0].empty()) continue;
    if (cells[1] == "fixture") columns = cells;
    for (size_t i = 2; cells.size() == columns.size() && cells[1] != "fixture" && i < cells.size(); ++i) {
      if (cells[1].find("---") == std::string::npos) table[cells[1]][columns[i]] = cells[i];
    }
  }
  return table;
}

// A test saw whether a fixture has what the column says. With MB_FAMILY_RESULTS the file of that name gets a line instead of the
// comparison with the document. Other models than FamilyFixtures are not in the table.
inline void SawOfFamily(const std::string& fixture, const std::string& column, bool good) {
  if (std::find(FamilyFixtures().begin(), FamilyFixtures().end(), fixture) == FamilyFixtures().end()) return;
  if (const char* results = std::getenv("MB_FAMILY_RESULTS")) {
    std::ofstream(results, std::ios::app) << fmt::format("{}\t{}\t{}\n", fixture, column, good ? "yes" : "no");
    return;
  }
  EXPECT_EQ(DocumentedFamilies()[fixture][column], good ? "yes" : "no")
      << "docs/models.md, " << fixture << ", " << column << ": `bash tests/models_table.sh` writes the table anew";
}

}  // namespace mbridge
