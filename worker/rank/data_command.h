// `mbrank data preprocess|inspect`: text to Megatron-LM's .bin/.idx, and checking such files.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace mbridge {

// Declares the subcommands on construction; Run executes the one that was parsed and returns the exit code
// (0 good, 2 bad input, 9 damaged data). Results go to standard output, errors to standard error.
class DataCommand {
 public:
  explicit DataCommand(CLI::App* app);
  int Run();

 private:
  int Preprocess();
  int Inspect();

  CLI::App* preprocess_;
  CLI::App* inspect_;
  std::vector<std::string> inputs_;
  std::string output_prefix_, json_key_ = "text", tokenizer_ = "ByteLevelTokenizer", format_ = "auto", prefix_;
  bool append_eod_ = true;
  bool full_ = false;
  long vocab_size_ = 0;
};

}  // namespace mbridge
