// compare A B: two runs side by side, iteration by iteration.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/comparison.h"
#include "client/mbctl/loss_series.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(fmt::format("cannot read {}", path));
  return text.str();
}

bool IsFile(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

// A file is a log; FILE.json:RUN a run of a losses file; everything else a job.
absl::StatusOr<LossSeries> ReadSeries(Session* session, const std::string& name) {
  if (IsFile(name)) {
    MB_ASSIGN_OR_RETURN(const std::string text, ReadFile(name));
    return name.ends_with(".json") ? ParseLosses(text, "", name) : ParseLog(text, name);
  }
  if (const size_t colon = name.rfind(':'); colon != std::string::npos && IsFile(name.substr(0, colon))) {
    MB_ASSIGN_OR_RETURN(const std::string text, ReadFile(name.substr(0, colon)));
    return ParseLosses(text, name.substr(colon + 1), name.substr(0, colon));
  }
  if (name.find('/') != std::string::npos || name.find(".json:") != std::string::npos) {
    return absl::NotFoundError(fmt::format("there is no file {}", name.substr(0, name.rfind(':'))));
  }
  MB_ASSIGN_OR_RETURN(client::Client * client, session->Connect());
  auto job = FindJob(client, name);
  if (absl::IsNotFound(job.status())) {
    return MakeStatus(absl::StatusCode::kNotFound, v1::REASON_JOB_NOT_FOUND,
                      fmt::format("{} is neither a file here nor a job: {}", name, std::string(job.status().message())));
  }
  MB_RETURN_IF_ERROR(job.status());
  MB_ASSIGN_OR_RETURN(const auto points, client->ReadMetrics({.job_id = job->job_id(), .effective = true}));
  return FromPoints(points, fmt::format("job {} (run {})", job->job_id(), job->run_name()));
}

std::string ComparisonTable(const Session& session, const LossSeries& a, const LossSeries& b, const Comparison& comparison) {
  std::string text = fmt::format("A: {}\nB: {}\n", a.source, b.source);
  for (const LossSeries* series : {&a, &b}) {
    for (const std::string& note : series->notes) text += fmt::format("   {}: {}\n", series == &a ? "A" : "B", note);
  }
  Table table({"ITERATION", "A LM LOSS", "B LM LOSS", "B - A", "GRAD NORM B - A", "VERDICT"});
  for (const ComparedRow& row : comparison.rows) {
    table.Add({row.label, fmt::format("{:.6f}", row.a), fmt::format("{:.6f}", row.b), fmt::format("{:+.2e}", row.difference),
               row.grad_norm_difference ? fmt::format("{:+.1e}", *row.grad_norm_difference) : "-", VerdictName(row.verdict)});
  }
  const char* color = comparison.verdict == Verdict::kDifferent ? "31" : "32";
  return text + table.Text() + "verdict: " + Colored(session.terminal, color, comparison.summary) + "\n";
}

std::string ComparisonJson(const LossSeries& a, const LossSeries& b, const Comparison& comparison) {
  const auto number = [](double value) -> nlohmann::ordered_json {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return value;
  };
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const ComparedRow& row : comparison.rows) {
    nlohmann::ordered_json entry = {{"iteration", row.label},
                                    {"a", number(row.a)},
                                    {"b", number(row.b)},
                                    {"difference", number(row.difference)},
                                    {"verdict", VerdictName(row.verdict)}};
    if (row.grad_norm_difference) entry["gradNormDifference"] = number(*row.grad_norm_difference);
    rows.push_back(std::move(entry));
  }
  const nlohmann::ordered_json root = {{"a", a.source},
                                       {"b", b.source},
                                       {"verdict", VerdictName(comparison.verdict)},
                                       {"summary", comparison.summary},
                                       {"rows", rows}};
  return root.dump(2) + "\n";
}

}  // namespace

void AddCompare(CLI::App* app, Session* session) {
  struct Flags {
    std::string a, b;
    ComparisonLimits limits;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app->add_subcommand("compare", "Losses of two runs side by side; exit code 1 where they differ");
  const char* help = "Job id or run name, a log file of Megatron-LM or Megatron-Bridge, or LOSSES.json:RUN";
  command->add_option("A", flags->a, help)->required();
  command->add_option("B", flags->b, help)->required();
  command->add_option("--tolerance", flags->limits.loss, "Loss difference that is equal; up to twice of it is close")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--grad-norm-tolerance", flags->limits.grad_norm, "Gradient norm difference that is equal")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->footer(
      "Time stamps tell the logs apart: microseconds are Megatron-LM's, whole seconds Megatron-Bridge's. Megatron-LM prints\n"
      "the mean of the first two iterations in its second line; it is turned back.\n"
      "Examples:\n"
      "  mbctl compare j-0123456789ab megatron.log\n"
      "  mbctl compare my-run tests/data/mlm/losses.json:seed1_default_dropout");
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(const LossSeries a, *session, ReadSeries(session, flags->a));
      MBCTL_ASSIGN_OR_FAIL(const LossSeries b, *session, ReadSeries(session, flags->b));
      const Comparison comparison = Compare(a, b, flags->limits);
      if (session->format == "json" || session->format == "yaml") {
        const std::string json = ComparisonJson(a, b, comparison);
        session->out << (session->json() ? json : JsonToYaml(json)) << std::flush;
      } else if (session->format == "name") {
        session->out << VerdictName(comparison.verdict) << std::endl;
      } else {
        session->out << ComparisonTable(*session, a, b, comparison) << std::flush;
      }
      return comparison.verdict == Verdict::kDifferent ? client::kExitJobFailed : client::kExitOk;
    };
  });
}

}  // namespace mbridge::mbctl
