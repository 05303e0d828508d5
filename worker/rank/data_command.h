// `mbrank data preprocess|inspect`: text to Megatron-LM's .bin/.idx, and checking such files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace mbridge {

// Declares the subcommands on construction; Run executes the one that was parsed and returns the exit code
// (0 good, 2 bad input, 3 file not found, 9 damaged data). Facts go to standard output, errors to standard error.
class DataCommand {
 public:
  explicit DataCommand(CLI::App* app);
  int Run();

 private:
  void DeclarePreprocess();
  void DeclareInspect();
  int Preprocess();
  int Inspect();

  CLI::App* preprocess_;
  CLI::App* inspect_;
  std::vector<std::string> inputs_;
  std::string output_prefix_, json_key_ = "text", tokenizer_ = "ByteLevelTokenizer", format_ = "auto";
  std::string prefix_;
  bool no_eod_ = false, overwrite_ = false, verify_ = false;
  int64_t vocab_size_ = 0;
};

}  // namespace mbridge
