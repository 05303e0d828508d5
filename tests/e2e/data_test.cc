// From a real text to a trained model: preprocess, inspect, train; and damaged data.
#include <array>
#include <cmath>
#include <set>

#include "tests/e2e/service_fixture.h"

namespace mbridge::e2e {
namespace {

using testing::HasSubstr;

// English text that every Debian machine has (base-files): the common licences, about 240 kB.
// MB_REAL_TEXT names another text file.
std::string RealText() {
  if (const char* path = getenv("MB_REAL_TEXT")) return ReadFile(path);
  std::set<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator("/usr/share/common-licenses")) {
    if (!entry.is_symlink() && entry.is_regular_file()) files.insert(entry.path());
  }
  std::string text;
  for (const auto& file : files) text += ReadFile(file) + "\n";
  return text;
}

// Nats a byte of the best model that knows only how often each byte occurs.
double UnigramEntropy(const std::string& text) {
  std::array<double, 256> counts{};
  for (const unsigned char c : text) counts[c] += 1;
  double entropy = 0;
  for (const double count : counts) {
    if (count > 0) entropy -= count / text.size() * std::log(count / text.size());
  }
  return entropy;
}

class Data : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(data_root());
    ASSERT_TRUE(service_.Start()) << service_.log_text();
  }
  std::filesystem::path data_root() const { return service_.directory() / "data"; }

  // Writes the text as a corpus; its prefix.
  std::string Preprocess(const std::string& text, const std::string& name) {
    const auto input = data_root() / (name + ".txt");
    WriteFile(input, text);
    const std::string prefix = data_root() / name;
    EXPECT_THAT(service_.Mbctl({"data", "preprocess", "--input", input, "--output-prefix", prefix}), Exited(0));
    EXPECT_TRUE(std::filesystem::exists(prefix + ".bin")) << prefix;
    EXPECT_TRUE(std::filesystem::exists(prefix + ".idx")) << prefix;
    return prefix;
  }

  static Arguments TrainOn(const std::string& prefix, int iterations, const Arguments& more = {}) {
    Arguments overrides = {"dataset.mock=false", "dataset.data_path=" + prefix, "dataset.split=98,1,1",
                           "tokenizer.tokenizer_type=ByteLevelTokenizer", "tokenizer.vocab_size=257"};
    for (const std::string& override_text : more) {
      std::erase_if(overrides, [&](const std::string& text) {
        return text.substr(0, text.find('=')) == override_text.substr(0, override_text.find('='));
      });
      overrides.push_back(override_text);
    }
    return TinyJob(iterations, overrides);
  }

  CommandResult Submit(const Arguments& job) const {
    Arguments arguments = {"submit"};
    arguments.insert(arguments.end(), job.begin(), job.end());
    return service_.Mbctl(arguments);
  }

  Service service_{Service::Options{.extra_arguments = {"--data-root", "/tmp"}}};
};

TEST_F(Data, TrainsOnRealEnglishBelowTheUnigramEntropy) {
  const std::string text = RealText();
  ASSERT_GT(text.size(), 100'000u);
  const double unigram = UnigramEntropy(text);
  const std::string prefix = Preprocess(text, "english");
  const CommandResult inspected = service_.Mbctl({"data", "inspect", prefix});
  ASSERT_THAT(inspected, Exited(0));

  const std::string id = service_.Submit(
      TrainOn(prefix, 150,
              {"model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=256", "model.seq_length=64",
               "dataset.seq_length=64", "train.global_batch_size=32", "train.micro_batch_size=16", "model.hidden_dropout=0",
               "model.attention_dropout=0", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3", "scheduler.lr_warmup_iters=10"}));
  const v1::Job job = service_.WaitForEnd(id, Seconds(240));
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  const auto points = service_.TrainPoints(id);
  ASSERT_TRUE(CompleteSeries(points, 150));
  EXPECT_GT(points.front().lm_loss(), 5.0) << "starts near ln 256 = 5.55";
  double last = 0;
  for (size_t i = points.size() - 10; i < points.size(); ++i) last += points[i].lm_loss() / 10;
  EXPECT_LT(last, unigram - 0.1) << "the mean of the last ten losses; the unigram entropy is " << unigram;
  RecordProperty("unigram_entropy", std::to_string(unigram));
  RecordProperty("final_loss", std::to_string(last));
  printf("%zu bytes, unigram entropy %.3f nats, mean of the last 10 losses %.3f nats\n", text.size(), unigram, last);
}

TEST_F(Data, TruncatedBinIsRefusedBeforeTheStart) {
  const std::string prefix = Preprocess(RealText().substr(0, 50'000), "cut");
  std::filesystem::resize_file(prefix + ".bin", 100);
  const CommandResult result = Submit(TrainOn(prefix, 5));
  EXPECT_THAT(result, Exited(2));
  EXPECT_THAT(result.err, HasSubstr("cut.bin"));
  EXPECT_NE(service_.Mbctl({"data", "inspect", prefix}).exit_code, 0);
}

TEST_F(Data, CorruptIndexIsRefusedBeforeTheStart) {
  const std::string prefix = Preprocess(RealText().substr(0, 50'000), "bad");
  std::string index = ReadFile(prefix + ".idx");
  index.replace(0, 4, "XXXX");
  WriteFile(prefix + ".idx", index);
  const CommandResult result = Submit(TrainOn(prefix, 5));
  EXPECT_THAT(result, Exited(2));
  EXPECT_THAT(result.err, HasSubstr("bad.idx"));
}

TEST_F(Data, TokensBeyondTheVocabularyAreFoundBeforeTheStart) {
  const std::string prefix = Preprocess(RealText().substr(0, 50'000), "wide");
  const CommandResult result = Submit(TrainOn(prefix, 5, {"tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=64"}));
  EXPECT_THAT(result, Exited(2));
  EXPECT_THAT(result.err, HasSubstr("vocab"));
}

TEST_F(Data, SplitThatLeavesValidationEmptyIsRefused) {
  const std::string prefix = Preprocess("One short document.\n", "short");
  const CommandResult result = Submit(TrainOn(prefix, 5, {"dataset.split=9999,8,2"}));
  EXPECT_THAT(result, Exited(2));
  EXPECT_THAT(result.err, HasSubstr("split"));
}

// 20,000 bytes are 612 samples of training: 200 iterations of 4 samples need a second epoch, 20 iterations do not.
TEST_F(Data, ALongerResumeSaysWhenTheOrderChanges) {
  const std::string prefix = Preprocess(RealText().substr(0, 20'000), "epochs");
  const std::string id = service_.Submit(TrainOn(prefix, 10, {"dataset.split='90,5,5'", "checkpoint.save_interval=5"}));
  ASSERT_EQ(service_.WaitForEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  const CommandResult same = service_.Mbctl({"resume", id, "--dry-run", "train.train_iters=20", "scheduler.lr_decay_iters=20"});
  ASSERT_THAT(same, Exited(0));
  EXPECT_THAT(same.out, testing::Not(HasSubstr("another order")));
  const CommandResult longer =
      service_.Mbctl({"resume", id, "--dry-run", "train.train_iters=200", "scheduler.lr_decay_iters=200"});
  ASSERT_THAT(longer, Exited(0));
  EXPECT_THAT(longer.out, testing::AllOf(HasSubstr("another order"), HasSubstr("2 epochs"), HasSubstr("instead of 1 epoch")));
}

TEST_F(Data, ChangedDataIsNotReadThroughOldIndices) {
  const std::string text = RealText();
  const std::string prefix = Preprocess(text.substr(0, 60'000), "changing");
  const std::string first = service_.Submit(TrainOn(prefix, 3));
  ASSERT_EQ(service_.WaitForEnd(first).state(), v1::JOB_STATE_SUCCEEDED);
  std::filesystem::remove(prefix + ".bin");
  std::filesystem::remove(prefix + ".idx");
  Preprocess(text.substr(100'000, 30'000), "changing");
  const std::string second = service_.Submit(TrainOn(prefix, 3));
  const v1::Job job = service_.WaitForEnd(second);
  ASSERT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.detail();
  EXPECT_FALSE(SameLosses(service_.TrainPoints(first), service_.TrainPoints(second)));
}

}  // namespace
}  // namespace mbridge::e2e
