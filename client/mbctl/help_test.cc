// Usage errors, help, the manual, completion scripts.
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "client/mbctl/completion.h"
#include "client/mbctl/help.h"
#include "client/mbctl/testing/command_fixture.h"

namespace mbridge::mbctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(Mbctl, WrongUsageIsTwo) {
  const std::vector<std::vector<std::string>> lines = {{},
                                                       {"frobnicate"},
                                                       {"submit"},
                                                       {"submit", "--no-such-option"},
                                                       {"get"},
                                                       {"ckpt"},
                                                       {"submit", "-r", "x", "--priority", "101"},
                                                       {"submit", "-r", "x", "--device", "tpu"},
                                                       {"ps", "-o", "xml"},
                                                       {"submit", "-r", "x", "--follow", "--wait"},
                                                       {"submit", "-r", "x", "--label", "novalue"},
                                                       {"help", "nothing"}};
  for (const auto& line : lines) {
    EXPECT_EQ(Run(line).code, 2) << ::testing::PrintToString(line);
  }
  EXPECT_THAT(Run({"ckpt", "verfy"}).err,
              AllOf(HasSubstr("no command 'verfy'; did you mean verify?"), HasSubstr("next: mbctl ckpt --help")));
  EXPECT_THAT(Run({"submti"}).err, HasSubstr("did you mean submit?"));
  EXPECT_THAT(Run({"submti", "--recipe", "x"}).err, HasSubstr("no command 'submti'; did you mean submit?"));
  EXPECT_THAT(Run({"help", "ckpt", "verfy"}).err,
              AllOf(HasSubstr("no help on 'verfy'; did you mean verify?"), HasSubstr("next: mbctl ckpt --help")));
}

// Also where CLI11 complains of something else that is missing, in front of the command, with the value in the word.
TEST_F(Mbctl, MistypedOptionsAreAnsweredWithTheNearest) {
  struct Case {
    std::vector<std::string> words;
    const char *wrong, *near, *next;
  };
  const Case cases[] = {{{"submit", "--recpie", "x"}, "no option --recpie", "; did you mean --recipe?", "mbctl submit --help"},
                        {{"submit", "-r", "x", "--dryrun"}, "no option --dryrun", "; did you mean --dry-run?", "mbctl submit"},
                        {{"submit", "-r", "x", "--prioritie=3"}, "no option --prioritie;", " did you mean --priority?", "next"},
                        {{"follow", "--timout", "5"}, "no option --timout", "; did you mean --timeout?", "mbctl follow --help"},
                        {{"resume", "--form=a@5"}, "no option --form", "; did you mean --from?", "mbctl resume --help"},
                        {{"--sever", "localhost:1", "ps"}, "no option --sever", "; did you mean --server?", "next"},
                        {{"ps", "--sever", "localhost:1"}, "no option --sever", "; did you mean --server?", "next"},
                        {{"ckpt", "--outptu"}, "no option --outptu", "; did you mean --output?", "mbctl ckpt --help"},
                        {{"ckpt", "ls", "--quite"}, "no option --quite", "; did you mean --quiet?", "mbctl ckpt ls --help"},
                        {{"submit", "-r", "x", "--unheard-of-thing"}, "no option --unheard-of-thing\n", "", "next"},
                        {{"submit", "-r", "x", "-Z"}, "no option -Z\n", "", "next"}};
  for (const auto& [words, wrong, near, next] : cases) {
    const Result result = Run(words);
    EXPECT_EQ(result.code, 2) << ::testing::PrintToString(words);
    EXPECT_THAT(result.err, AllOf(HasSubstr(std::string(wrong) + near), HasSubstr(next))) << ::testing::PrintToString(words);
  }
  EXPECT_THAT(Run({"ps", "-o", "xml"}).err, HasSubstr("xml")) << "options that exist keep CLI11's words";
}

TEST_F(Mbctl, HelpAndVersionAreZeroAndOnStdout) {
  const std::vector<std::vector<std::string>> lines = {{"--help"},
                                                       {"submit", "--help"},
                                                       {"ckpt", "ls", "--help"},
                                                       {"--version"},
                                                       {"version"},
                                                       {"help"},
                                                       {"help", "submit"},
                                                       {"help", "ckpt", "ls"},
                                                       {"help", "exit-codes"},
                                                       {"help", "errors"},
                                                       {"help", "errors", "nan-loss"}};
  for (const auto& line : lines) {
    const Result result = Run(line);
    EXPECT_EQ(result.code, 0) << ::testing::PrintToString(line) << result.err;
    EXPECT_NE(result.out, "") << ::testing::PrintToString(line);
  }
  EXPECT_THAT(Run({"help", "errors", "REASON_NAN_LOSS"}).out, AllOf(HasSubstr("optimizer.lr"), HasSubstr("exit code 1")));
  EXPECT_EQ(Run({"help", "errors", "NAN_LOS"}).code, 3);
  EXPECT_THAT(Run({"help", "errors", "NAN_LOS"}).err, HasSubstr("NAN_LOSS"));
}

TEST(Manual, HasTheExitCodesOfTheSchema) {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/docs/mbctl.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(ExitCodesMarkdown())) << "docs/mbctl.md must contain this table:\n" << ExitCodesMarkdown();
}

TEST(Manual, NamesEveryCommand) {
  std::ifstream file(std::string(MB_SOURCE_DIR) + "/docs/mbctl.md");
  std::stringstream text;
  text << file.rdbuf();
  std::ostringstream out, err;
  Session session(out, err, Terminal(), [](const std::string&) { return std::nullopt; });
  const auto app = MakeApp(&session);
  for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
    EXPECT_THAT(text.str(), HasSubstr("`" + command->get_name())) << command->get_name();
  }
}

// The `mbctl submit` lines of a text, each as words; lines that end in a backslash go on. Lines with "..." are no commands.
std::vector<std::string> SubmitLines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line, more; std::getline(stream, line);) {
    size_t at = line.find("mbctl submit -");
    if (at == std::string::npos || line.find('`') != std::string::npos) continue;
    while (line.ends_with('\\') && std::getline(stream, more)) line = line.substr(0, line.size() - 1) + more;
    if (line.find("...") == std::string::npos) lines.push_back(line.substr(at));
  }
  return lines;
}

std::vector<std::string> Words(const std::string& line) {
  std::istringstream stream(line.substr(0, line.find_first_of(">#)")));
  std::vector<std::string> words;
  std::string word;
  stream >> word;  // mbctl
  while (stream >> word) words.push_back(word.starts_with("\"$") ? "11111111-2222-4333-8444-555555555555" : word);
  return words;
}

TEST_F(Mbctl, EveryPrintedSubmitIsValid) {
  std::string text = Run({"help"}).out + Run({"submit", "--help"}).out;
  for (const char* page : {"/docs/mbctl.md", "/docs/megatron-lm.md", "/README.md"}) {
    std::ifstream file(std::string(MB_SOURCE_DIR) + page);
    std::stringstream content;
    content << file.rdbuf();
    ASSERT_NE(content.str(), "") << page;
    text += "\n" + content.str();
  }
  const std::vector<std::string> lines = SubmitLines(text);
  EXPECT_GE(lines.size(), 11u);
  const std::string written =
      ::testing::TempDir() + std::to_string(getpid()) + "-run.yaml";  // The examples make run.yaml before they use it.
  for (const std::string& line : lines) {
    std::vector<std::string> words = Words(line);
    if (std::find(words.begin(), words.end(), "--hf") != words.end()) continue;  // Reads a model, by mbrank: end-to-end tests.
    std::replace(words.begin(), words.end(), std::string("run.yaml"), written);
    if (std::find(words.begin(), words.end(), "--dry-run") == words.end()) words.push_back("--dry-run");
    words.push_back("--local");
    const Result result = Run(words);
    EXPECT_EQ(result.code, 0) << line << "\n" << result.err;
    if (line.ends_with("> run.yaml")) std::ofstream(written) << result.out;
  }
  std::remove(written.c_str());
}

class Completion : public ::testing::Test {
 protected:
  void SetUp() override { app_ = MakeApp(&session_); }
  // Runs bash on text; its exit code and output.
  static std::pair<int, std::string> Bash(const std::string& flags, const std::string& text) {
    const std::string path = ::testing::TempDir() + std::to_string(getpid()) + "-completion.bash";
    std::ofstream(path) << text;
    FILE* pipe = popen(("bash " + flags + " " + path + " 2>&1").c_str(), "r");
    std::string output;
    char buffer[4096];
    while (size_t n = fread(buffer, 1, sizeof(buffer), pipe)) output.append(buffer, n);
    const int status = pclose(pipe);
    std::remove(path.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
  }
  std::ostringstream out_, err_;
  Session session_{out_, err_, Terminal(), [](const std::string&) { return std::nullopt; }};
  std::unique_ptr<CLI::App> app_;
};

TEST_F(Completion, BashScriptIsValid) {
  const auto [code, output] = Bash("-n", BashCompletion(*app_));
  EXPECT_EQ(code, 0) << output;
}

TEST_F(Completion, BashScriptCompletes) {
  const auto complete = [&](const std::string& words, int index) {
    return Bash("", BashCompletion(*app_) + "\nmbctl() { :; }\ncompopt() { :; }\nCOMP_WORDS=(" + words +
                        ")\nCOMP_CWORD=" + std::to_string(index) + "\n_mbctl\necho \"${COMPREPLY[@]}\"\n")
        .second;
  };
  EXPECT_EQ(complete("mbctl sub", 1), "submit\n");
  EXPECT_EQ(complete("mbctl ckpt ver", 2), "verify\n");
  EXPECT_EQ(complete("mbctl submit --fol", 2), "--follow\n");
  EXPECT_EQ(complete("mbctl submit --start re", 3), "resume\n");
}

TEST_F(Completion, ZshAndFishNameEveryCommand) {
  const std::string zsh = ZshCompletion(*app_), fish = FishCompletion(*app_);
  EXPECT_THAT(zsh, HasSubstr("#compdef mbctl"));
  for (const char* command : {"submit", "compare", "completion"})
    EXPECT_THAT(fish, HasSubstr(std::string(" -a ") + command + " "));
  EXPECT_THAT(fish, HasSubstr("-l follow"));
}

}  // namespace
}  // namespace mbridge::mbctl
