// mbctl bench with real ranks: no coordinator, nothing left behind.
#include <signal.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class Bench : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(temporary());
    std::filesystem::create_directory(here());
  }
  // After every bench: no file in the user's directory, no temporary directory, no process.
  void TearDown() override {
    EXPECT_TRUE(std::filesystem::is_empty(here()));
    EXPECT_TRUE(std::filesystem::is_empty(temporary()));
    EXPECT_TRUE(ProcessesWithEnvironment("MB_E2E_ID", id()).empty());
  }

  const std::filesystem::path& scratch() const { return scratch_.path(); }
  std::filesystem::path temporary() const { return scratch() / "tmp"; }
  std::filesystem::path here() const { return scratch() / "here"; }
  std::string id() const { return scratch().filename(); }
  SpawnOptions Options(const std::map<std::string, std::string>& environment = {}) const {
    SpawnOptions options;
    options.directory = here();
    options.environment = environment;
    options.environment.insert({{"TMPDIR", temporary()}, {"MB_E2E_ID", id()}, {"MBCTL_SERVER", "unix:/nonexistent"}});
    return options;
  }
  static Arguments Line(const Arguments& more) {
    Arguments line = {Program("mbctl"), "bench"};
    line.insert(line.end(), more.begin(), more.end());
    return line;
  }
  CommandResult Run(const Arguments& more, const std::map<std::string, std::string>& environment = {}) const {
    return RunCommand(Line(more), Options(environment));
  }

  // Two ranks that train until somebody ends them, with standard error in a file of that name.
  Process StartLong(const std::string& name) const {
    SpawnOptions options = Options();
    options.err_path = scratch() / name;
    return Process(Line(SlowJob(3, {"--ranks", "2", "--iters", "10000"})), options);
  }
  std::string Errors(const std::string& name) const { return ReadFile(scratch() / name); }
  bool Trains(const std::string& name) const {
    return WaitUntil([&] { return Errors(name).find("data parallelism: 2 ranks") != std::string::npos; }, Seconds(30));
  }

 private:
  ScratchDirectory scratch_;
};

// The lengths of TinyJob have no part in it.
TEST_F(Bench, OneRankForPeople) {
  const CommandResult result = Run(TinyJob(3));
  ASSERT_THAT(result, Exited(0));
  EXPECT_THAT(result.out, AllOf(HasSubstr("7 count, the first 3 do not\n"), HasSubstr("ms an iteration"), HasSubstr("tokens/s"),
                                HasSubstr("TFLOP/s/rank"), HasSubstr(" planned, "), HasSubstr("last loss         5.")));
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("memory of rank 0, as planned"), HasSubstr("train.train_iters=3 has no part in a bench")));
}

TEST_F(Bench, TwoRanksForPrograms) {
  const CommandResult result = Run(TinyJob(3, {"--ranks", "2", "--iters", "6", "-o", "json", "-q"}));
  ASSERT_THAT(result, Exited(0));
  EXPECT_EQ(result.err, "");
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["iterations"], 3);
  const double tokens = json["tokensPerSecond"];
  EXPECT_GT(tokens, 0);
  EXPECT_DOUBLE_EQ(json["tokensPerSecondPerRank"], tokens / 2);
  // 4 sequences of 32 tokens an iteration, both ranks together; the two medians may be of different iterations.
  EXPECT_NEAR(128e3 / tokens, json["medianMs"], 1e-3 * static_cast<double>(json["medianMs"]));
  EXPECT_GT(json["memoryPlannedBytes"], 0);
  EXPECT_GT(json["memoryUsedBytes"], json["memoryPlannedBytes"]) << "the program itself has memory too";
  EXPECT_NEAR(json["lastLoss"], std::log(256), 0.2);
}

TEST_F(Bench, WrongLinesStartNothing) {
  const CommandResult key = Run(TinyJob(3, {"model.hiden_size=64"}));
  EXPECT_THAT(key, Exited(2));
  EXPECT_THAT(key.err, AllOf(HasSubstr("did you mean model.hidden_size?"), Not(HasSubstr("as planned"))));
  const CommandResult few = Run(TinyJob(3, {"--iters", "4"}));
  EXPECT_THAT(few, Exited(2));
  EXPECT_THAT(few.err, HasSubstr("5 to 100000"));
}

TEST_F(Bench, AFailedRankSaysItsReason) {
  for (const char* ranks : {"1", "2"}) {
    const CommandResult result =
        Run(TinyJob(3, {"--ranks", ranks, "-q", "optimizer.lr=1e30", "optimizer.min_lr=1e30", "optimizer.clip_grad=0"}));
    EXPECT_THAT(result, Exited(1));
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, AllOf(HasSubstr(std::string(" of ") + ranks + ": the lm loss of iteration"), HasSubstr("NAN_LOSS")));
  }
}

TEST_F(Bench, AKilledRankShowsItsLastLines) {
  const CommandResult result = Run(TinyJob(3, {"-q"}), {{"MB_FAILPOINTS", "train.iteration=kill@3"}});
  EXPECT_THAT(result, Exited(1));
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 of 1 ended with signal 9"), HasSubstr("training starts after iteration 0")));
}

// The other one reports a lost peer, or is ended: neither is what the bench failed of.
TEST_F(Bench, NamesTheRankThatDiedFirst) {
  Process process = StartLong("died");
  ASSERT_TRUE(Trains("died")) << Errors("died");
  for (const pid_t pid : ProcessesWithEnvironment("MB_E2E_ID", id())) {
    if (CommandLineOf(pid).find("rank-1.events") != std::string::npos) kill(pid, SIGKILL);
  }
  ASSERT_TRUE(process.Wait(Seconds(20)));
  EXPECT_EQ(process.exit_code(), 1);
  EXPECT_THAT(Errors("died"), HasSubstr("rank 1 of 2 ended with signal 9"));
}

TEST_F(Bench, EndsItsRanksWhenItIsEnded) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string name = std::to_string(signal);
    Process process = StartLong(name);
    ASSERT_TRUE(Trains(name)) << Errors(name);
    process.Signal(signal);
    ASSERT_TRUE(process.Wait(Seconds(10)));
    EXPECT_EQ(process.exit_code(), 130);
    EXPECT_THAT(Errors(name), HasSubstr("the ranks are ended"));
  }
}

}  // namespace
}  // namespace mbridge::e2e
