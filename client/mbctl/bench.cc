// bench: a short training on this machine by the rank programs, which hold the engine, and what it measured.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "client/lib/exit_code.h"
#include "client/mbctl/bench_run.h"
#include "client/mbctl/bench_summary.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/config_source.h"
#include "client/mbctl/dry_run.h"
#include "client/mbctl/output.h"
#include "client/mbctl/progress_line.h"
#include "client/mbctl/rank_program.h"
#include "client/mbctl/session.h"
#include "client/mbctl/submit.h"
#include "proto/format/memory_table.h"
#include "recipes/config/resolve.h"

namespace mbridge::mbctl {
namespace {

constexpr int kLeftOut = 3;  // Allocations, choices of algorithms, graphs and clocks settle in the first iterations.
constexpr int kFewest = kLeftOut + 2, kMost = 100'000;

struct BenchFlags {
  ConfigSource source;
  std::string device = "auto";
  int ranks = 0, iterations = 10;
  std::vector<std::string> overrides;
};

bool HasGpu() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && name.size() > 6 && std::isdigit(static_cast<unsigned char>(name[6]))) return true;
  }
  return false;
}

v1::Device ChooseDevice(const std::string& word) {
  const bool cuda = word == "cuda" || (word == "auto" && HasGpu() && HasRankProgram(kCudaRankProgram));
  return cuda ? v1::DEVICE_CUDA : v1::DEVICE_CPU;
}

// The value of the first line "NAME : value" of a file below /proc.
std::string ProcValue(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t begin = line.find_first_not_of(" \t", std::min(line.find(':'), line.size() - 1) + 1);
    if (line.starts_with(name) && begin != std::string::npos) return line.substr(begin);
  }
  return "";
}

// Of the CPU, or of the GPUs where the driver shows them and all are equal; empty: not known.
std::string DeviceName(bool cuda) {
  if (!cuda) return ProcValue("/proc/cpuinfo", "model name");
  std::set<std::string> names;
  std::error_code error;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    names.insert(ProcValue(gpu.path() / "information", "Model"));
  }
  return names.size() == 1 ? *names.begin() : "";
}

// Lines that make a bench of a training, after the user's. A warm-up as a fraction is as good.
std::vector<std::string> BenchLines(const BenchFlags& flags) {
  std::vector<std::string> lines = {fmt::format("train.train_iters={}", flags.iterations),
                                    fmt::format("scheduler.lr_decay_iters={}", flags.iterations), "logger.log_interval=1",
                                    "validation.eval_iters=0"};
  const bool fraction = std::any_of(flags.overrides.begin(), flags.overrides.end(), [](const std::string& line) {
    return line.find("scheduler.lr_warmup_fraction=") != std::string::npos;
  });
  if (!fraction) lines.emplace_back("scheduler.lr_warmup_iters=0");
  return lines;
}

struct Training {
  v1::JobSpec spec;
  std::string recipe;  // Its name, whoever chose it; of a file without one the file's.
};

// What is trained, on which device by how many ranks. Errors as of a submit.
absl::StatusOr<Training> MakeTraining(Session* session, const BenchFlags& flags) {
  MB_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadConfigSource(session, flags.source, true));
  spec.set_device(ChooseDevice(flags.device));
  spec.set_ranks(flags.ranks);
  const std::vector<std::string> lines = BenchLines(flags);
  const std::vector<std::string> merged = MergeOverrides(flags.overrides, lines);
  for (const std::string& line : flags.overrides) {
    if (std::find(merged.begin(), merged.end(), line) == merged.end()) {
      session->Say(fmt::format("note: {} has no part in a bench; lengths come from --iters", line));
    }
  }
  for (const std::string& line : merged) spec.add_overrides(line);
  MB_ASSIGN_OR_RETURN(const v1::ResolvedConfig resolved, recipes::Resolve(ToResolveRequest(spec)));
  spec.set_ranks(resolved.ranks());
  for (const v1::AutomaticChange& change : resolved.changes()) {
    session->Say(fmt::format("changed {}: {} -> {} ({})", change.key(), change.old_value(), change.new_value(), change.why()));
  }
  for (const std::string& warning : resolved.warnings()) session->Say(warning);
  return Training{std::move(spec), resolved.recipe().empty() ? flags.source.config_file : resolved.recipe()};
}

void Print(Session* session, const BenchSummary& summary) {
  const std::string json = ToJson(summary).dump(2);
  session->out << (session->format == "json" ? json + "\n" : session->format == "yaml" ? JsonToYaml(json) : ToText(summary));
  session->out.flush();
}

int Bench(Session* session, const BenchFlags& flags) {
  if (session->format == "name") return session->Usage("a bench has no name; -o table, json or yaml");
  MBCTL_ASSIGN_OR_FAIL(const Training training, *session, MakeTraining(session, flags));
  const v1::JobSpec& spec = training.spec;
  ProgressLine progress(session->err, session->terminal);
  const auto ran = RunBench(spec, [&](const v1::RankRecord& record) {
    if (session->quiet) return;
    if (record.what_case() == v1::RankRecord::kMetric) return progress.Update("bench", record.metric());
    progress.Clear();
    if (record.what_case() == v1::RankRecord::kMessage) session->err << record.message() << std::endl;
  });
  progress.Clear();
  MBCTL_ASSIGN_OR_FAIL(const BenchReport report, *session, ran);
  if (report.interrupted) {
    session->Say(fmt::format("interrupted after {} iterations; the ranks are ended", report.points.size()));
    return client::kExitInterrupted;
  }
  MBCTL_ASSIGN_OR_FAIL(BenchSummary summary, *session, Summarize(report.points, kLeftOut));
  summary.recipe = training.recipe;
  summary.cuda = spec.device() == v1::DEVICE_CUDA;
  summary.device_name = DeviceName(summary.cuda);
  summary.ranks = spec.ranks();
  summary.parameters = report.started.parameters();
  summary.planned_bytes = TotalBytes(report.started.memory());
  summary.used_bytes = summary.cuda ? report.result.device_bytes_in_use() : report.most_resident_bytes;
  Print(session, summary);
  return client::kExitOk;
}

}  // namespace

void AddBench(CLI::App* app, Session* session) {
  auto flags = std::make_shared<BenchFlags>();
  auto* command = app->add_subcommand(
      "bench", "Speed and memory of a short training on this machine, without coordinator and checkpoints; runs mbrank");
  AddConfigSource(command, &flags->source);
  command->add_option("OVERRIDES", flags->overrides, "key.path=value, as in Megatron-Bridge")->type_name("KEY=VALUE");
  command
      ->add_option("--device", flags->device,
                   "Where to train; auto: on GPUs where the machine has one and mbrank-cuda stands beside mbctl")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command->add_option("--ranks", flags->ranks, "Processes, a GPU each; 0: the smallest number that the parallel sizes allow")
      ->check(CLI::Range(0, 1024));
  command
      ->add_option("--iters", flags->iterations,
                   fmt::format("Iterations; default {}. The first {} do not count", flags->iterations, kLeftOut))
      ->check(CLI::Range(kFewest, kMost));
  command->footer(
      "Several ranks take a GPU each, in the order of CUDA_VISIBLE_DEVICES. Nothing is evaluated or saved; other lengths of "
      "training and\n"
      "schedule than --iters do not count. The plan of the memory and the progress go to stderr, not with --quiet.\n"
      "Examples:\n"
      "  mbctl bench --recipe llama32_1b_pretrain_config --device cuda train.global_batch_size=8 train.micro_batch_size=1\n"
      "  mbctl bench -r vanilla_gpt_pretrain_config --device cpu --ranks 2 --iters 20 -o json model.num_layers=2 \\\n"
      "    model.hidden_size=256 model.num_attention_heads=4 train.global_batch_size=8");
  command->callback([=] { session->action = [=]() -> int { return Bench(session, *flags); }; });
}

}  // namespace mbridge::mbctl
