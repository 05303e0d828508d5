// Runs the correlation model with mbrank and compares every printed number with the real Megatron-LM run of the same name
// (tests/data/mlm/losses.json). Nothing but the seed is shared: initial weights, data, order and dropout masks are our own.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

extern char** environ;

namespace {

using nlohmann::json;

struct Losses {
  std::vector<double> lm_loss, grad_norm, validation;
  double test = 0;
};

struct Bounds {
  double usual = 1e-4;  // What is expected at every iteration.
  double hard = 2e-4;   // Never above.
  double grad_norm = 2e-3;
};

const std::vector<std::string> kCorrelationRun = {"model.num_layers=2",          "model.hidden_size=256",
                                                  "model.num_attention_heads=4", "model.ffn_hidden_size=1024",
                                                  "model.seq_length=512",        "dataset.seq_length=512",
                                                  "train.train_iters=10",        "train.global_batch_size=32",
                                                  "train.micro_batch_size=4",    "validation.eval_interval=10",
                                                  "validation.eval_iters=2",     "optimizer.lr=3e-4",
                                                  "optimizer.min_lr=3e-5",       "rng.seed=1234",
                                                  "logger.log_interval=1"};

const std::vector<std::string> kLlamaTiny = {"model.num_layers=4",
                                             "model.hidden_size=256",
                                             "model.num_attention_heads=8",
                                             "model.num_query_groups=2",
                                             "model.ffn_hidden_size=704",
                                             "model.seq_length=512",
                                             "model.normalization=RMSNorm",
                                             "model.position_embedding_type=rope",
                                             "model.rotary_base=500000",
                                             "model.gated_linear_unit=true",
                                             "model.activation_func=silu",
                                             "model.add_bias_linear=false",
                                             "model.share_embeddings_and_output_weights=false",
                                             "tokenizer.vocab_size=2047",
                                             "train.train_iters=10",
                                             "train.global_batch_size=16",
                                             "train.micro_batch_size=4",
                                             "validation.eval_interval=10",
                                             "validation.eval_iters=2",
                                             "optimizer.lr=3e-4",
                                             "optimizer.min_lr=3e-5",
                                             "rng.seed=1234",
                                             "logger.log_interval=1"};

// The run of Megatron-Bridge's second example.
const std::vector<std::string> kSecondRun = {
    "model.num_layers=4",         "model.hidden_size=256",       "model.num_attention_heads=4",
    "model.ffn_hidden_size=1024", "model.seq_length=1024",       "dataset.seq_length=1024",
    "tokenizer.vocab_size=1024",  "train.train_iters=10",        "train.global_batch_size=16",
    "train.micro_batch_size=2",   "validation.eval_interval=10", "validation.eval_iters=2",
    "optimizer.lr=1e-4",          "optimizer.min_lr=0",          "rng.seed=1234",
    "logger.log_interval=1"};

const std::vector<std::string> kNoDropout = {"model.hidden_dropout=0", "model.attention_dropout=0"};

Losses Oracle(const std::string& run, const char* from = "losses.json") {
  std::ifstream file(MB_SOURCE_DIR "/tests/data/mlm/" + std::string(from));
  const json entry = json::parse(file).at("runs").at(run);
  Losses losses;
  losses.lm_loss = entry.at("lm_loss").get<std::vector<double>>();
  losses.grad_norm = entry.at("grad_norm").get<std::vector<double>>();
  losses.validation = entry.at("validation_after_10").get<std::vector<double>>();
  losses.test = entry.at("test").get<double>();
  return losses;
}

pid_t Start(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  for (const std::string& entry : environment) putenv(const_cast<char*>(entry.c_str()));
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

// A minute or two each: the short form, without MB_FULL=1, ends after four of the ten iterations and its schedule is that of ten.
// parity_seed1 and parity_llama_tiny always run whole.
constexpr int kShortIterations = 4;
bool IsFull() { return std::getenv("MB_FULL") != nullptr; }

// Trains with `ranks` processes and reads the metric points of rank 0.
Losses Train(const std::string& name, int ranks, const std::vector<std::string>& overrides,
             const std::vector<std::string>& environment = {}, const std::vector<std::string>& run = kCorrelationRun) {
  const char* bin = std::getenv("MB_BIN_DIR");
  const std::string program = std::string(bin == nullptr ? "build/bin" : bin) + "/mbrank";
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("mbridge_parity_{}_{}", name, getpid());
  std::filesystem::create_directories(folder);
  const std::string metrics = (folder / "metrics.jsonl").string();
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> arguments = {program,        "train",
                                          "--recipe",     "vanilla_gpt_megatron_lm_config",
                                          "--ranks",      std::to_string(ranks),
                                          "--rank",       std::to_string(rank),
                                          "--metrics",    metrics,
                                          "--rendezvous", (folder / "rendezvous").string()};
    arguments.insert(arguments.end(), run.begin(), run.end());
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
    processes.push_back(Start(arguments, environment));
  }
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "mbrank ended with wait status " << status;
  }
  Losses losses;
  std::ifstream file(metrics);
  for (std::string line; std::getline(file, line);) {
    const json point = json::parse(line);
    const double loss = point.at("lmLoss").get<double>();
    const std::string kind = point.at("kind").get<std::string>();
    if (kind == "METRIC_KIND_TRAIN") {
      losses.lm_loss.push_back(loss);
      losses.grad_norm.push_back(point.at("gradNorm").get<double>());
    } else if (kind == "METRIC_KIND_VALIDATION") {
      losses.validation.push_back(loss);
    } else {
      losses.test = loss;
    }
  }
  std::filesystem::remove_all(folder);
  return losses;
}

void CompareSeries(const char* what, const std::vector<double>& ours, const std::vector<double>& theirs, double usual,
                   double hard) {
  ASSERT_EQ(ours.size(), theirs.size()) << what;
  double worst = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double difference = std::abs(ours[i] - theirs[i]);
    worst = std::max(worst, difference);
    EXPECT_LE(difference, usual) << what << " " << i + 1 << ": ours " << ours[i] << ", Megatron-LM " << theirs[i];
    EXPECT_LE(difference, hard) << what << " " << i + 1;
    fmt::print("{:>10} {:2}  ours {:.9f}  Megatron-LM {:.9f}  difference {:+.2e}\n", what, i + 1, ours[i], theirs[i],
               ours[i] - theirs[i]);
  }
  fmt::print("{:>10}     worst {:.2e} (bound {:.0e})\n", what, worst, usual);
}

void Compare(const Losses& ours, Losses theirs, const Bounds& bounds, bool whole = true) {
  if (!whole) {
    theirs.lm_loss.resize(kShortIterations);
    theirs.grad_norm.resize(kShortIterations);
    CompareSeries("lm loss", ours.lm_loss, theirs.lm_loss, bounds.usual, bounds.hard);
    CompareSeries("grad norm", ours.grad_norm, theirs.grad_norm, bounds.grad_norm, bounds.grad_norm);
    fmt::print("{} of 10 iterations, no validation: MB_FULL=1 runs all\n", kShortIterations);
    return;
  }
  CompareSeries("lm loss", ours.lm_loss, theirs.lm_loss, bounds.usual, bounds.hard);
  CompareSeries("grad norm", ours.grad_norm, theirs.grad_norm, bounds.grad_norm, bounds.grad_norm);
  CompareSeries("validation", ours.validation, theirs.validation, bounds.usual, bounds.hard);
  CompareSeries("test", {ours.test}, {theirs.test}, bounds.usual, bounds.hard);
}

// The run of the same name, in its short form unless MB_FULL=1.
void CheckRun(const std::string& name, int ranks, std::vector<std::string> overrides, const Bounds& bounds = {},
              const std::vector<std::string>& run = kCorrelationRun, const char* oracles = "losses.json") {
  if (!IsFull()) overrides.push_back(fmt::format("train.exit_interval={}", kShortIterations));
  Compare(Train(name, ranks, overrides, {}, run), Oracle(name, oracles), bounds, IsFull());
}

std::vector<std::string> And(std::vector<std::string> overrides, const std::vector<std::string>& more) {
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

TEST(Parity, parity_seed1) { Compare(Train("seed1", 1, kNoDropout), Oracle("seed1"), {}); }

TEST(Parity, parity_seed1_default_dropout) { CheckRun("seed1_default_dropout", 1, {}); }

TEST(Parity, parity_seed1_fp32) {
  CheckRun("seed1_fp32", 1, And(kNoDropout, {"mixed_precision=null"}), {.usual = 2e-5, .hard = 2e-5, .grad_norm = 1e-3});
}

TEST(Parity, parity_seed1_dp2) { CheckRun("seed1_dp2", 2, kNoDropout); }

TEST(Parity, parity_seed2_dp2_distopt) {
  CheckRun("seed2_dp2_distopt", 2,
           And(kNoDropout, {"ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"}), {}, kSecondRun);
}

// Two tensor-parallel ranks, each with weights that it draws itself: other losses than those of one rank from iteration 1 on.
const std::vector<std::string> kTensorParallel = {"model.tensor_model_parallel_size=2"};
const std::vector<std::string> kSequenceParallel = {"model.tensor_model_parallel_size=2", "model.sequence_parallel=true"};
constexpr Bounds kTensorParallelBounds = {.usual = 2e-4, .hard = 2e-4};

TEST(Parity, parity_seed2_tp2) { CheckRun("seed2_tp2", 2, And(kNoDropout, kTensorParallel), kTensorParallelBounds, kSecondRun); }

TEST(Parity, parity_seed2_tp2_sp) {
  CheckRun("seed2_tp2_sp", 2, And(kNoDropout, kSequenceParallel), kTensorParallelBounds, kSecondRun);
}

// Beside what an independent emulation predicts for Megatron-LM: no real run is known. Its losses are good to about 5e-5 if the
// dropout streams of sequence parallelism were derived rightly, there and here.
TEST(Parity, parity_seed2_tp2_sp_default_dropout) {
  CheckRun("seed2_tp2_sp_default_dropout", 2, kSequenceParallel, kTensorParallelBounds, kSecondRun, "predictions.json");
}

TEST(Parity, parity_seed1_tp2_sp) {
  if (!IsFull()) GTEST_SKIP() << "SKIPPED: seed2 has its parts; MB_FULL=1 runs it";
  CheckRun("seed1_tp2_sp", 2, And(kNoDropout, kSequenceParallel), kTensorParallelBounds, kCorrelationRun, "predictions.json");
}

TEST(Parity, parity_seed1_tp2_sp_default_dropout) {
  if (!IsFull()) GTEST_SKIP() << "SKIPPED: seed2 has its parts; MB_FULL=1 runs it";
  CheckRun("seed1_tp2_sp_default_dropout", 2, kSequenceParallel, kTensorParallelBounds, kCorrelationRun, "predictions.json");
}

// Llama parts: RMSNorm, rotary positions, SwiGLU, grouped-query attention, an output layer of its own, no biases. From iteration
// 2 on this run is chaotic at 1e-4 (gradient norms of 3 to 5): an emulation that only sums in another order, or starts from
// weights of which 2e-4 are one BF16 step off, moves by that much. So the first iteration has the usual bound and shows wrong
// rules.
TEST(Parity, parity_llama_tiny) {
  const Losses ours = Train("llama_tiny", 1, kNoDropout, {}, kLlamaTiny), theirs = Oracle("llama_tiny");
  ASSERT_FALSE(ours.lm_loss.empty());
  EXPECT_NEAR(ours.lm_loss[0], theirs.lm_loss[0], 1e-4);
  EXPECT_NEAR(ours.grad_norm[0], theirs.grad_norm[0], 1e-3);
  Compare(ours, theirs, {.usual = 6e-4, .hard = 6e-4, .grad_norm = 1.5e-2});
}

// Experts: router, top 2 of 4, load-balancing loss (whose gradient the norm of iteration 1 shows). Rounding decides the choice of
// some tokens, so the bounds are wider than llama_tiny's.
TEST(Parity, parity_moe_tiny) {
  std::vector<std::string> overrides = kNoDropout;
  for (const char* line : {"model.num_moe_experts=4", "model.moe_router_topk=2", "model.moe_aux_loss_coeff=0.01",
                           "model.moe_router_load_balancing_type=aux_loss", "model.moe_ffn_hidden_size=352"}) {
    overrides.push_back(line);
  }
  const Losses ours = Train("moe_tiny", 1, overrides, {}, kLlamaTiny), theirs = Oracle("moe_tiny");
  ASSERT_FALSE(ours.lm_loss.empty());
  EXPECT_NEAR(ours.lm_loss[0], theirs.lm_loss[0], 1.5e-4);
  EXPECT_NEAR(ours.grad_norm[0], theirs.grad_norm[0], 1e-3);
  Compare(ours, theirs, {.usual = 1e-3, .hard = 1e-3, .grad_norm = 1.5e-2});
}

// The widened FP32 products of a CPU without BF16 instructions.
TEST(Parity, parity_seed1_avx2) {
  if (!__builtin_cpu_supports("avx512bf16")) {
    GTEST_SKIP() << "SKIPPED: this CPU has no BF16 instructions, so parity_seed1 runs the AVX2 path already";
  }
  Compare(Train("seed1_avx2", 1, kNoDropout, {"ONEDNN_MAX_CPU_ISA=AVX2"}), Oracle("seed1"), {});
}

}  // namespace
