// A test with a folder of its own for files.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace mbridge {

class ScratchTest : public testing::Test {
 protected:
  ScratchTest() {
    std::string pattern = testing::TempDir() + "mb_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~ScratchTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  static void Write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

  std::string directory_;
};

}  // namespace mbridge
