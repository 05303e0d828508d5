// metrics JOB: table, JSON lines, or a plot in the terminal.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/interrupt.h"
#include "client/mbctl/output.h"
#include "client/mbctl/plot.h"
#include "client/mbctl/session.h"
#include "recipes/config/word_option.h"

namespace mbridge::mbctl {
namespace {

constexpr auto kRedrawInterval = std::chrono::milliseconds(500);

struct MetricFlags {
  std::string job, y = "loss";
  bool follow = false, plot = false, all_attempts = false;
  int attempt = 0;
};

std::string Number(double value, const char* format) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Inf" : "-Inf";
  return fmt::format(fmt::runtime(format), value);
}

std::string KindName(const v1::MetricPoint& point) {
  if (point.kind() == v1::METRIC_KIND_TEST) return "test";
  if (point.kind() == v1::METRIC_KIND_VALIDATION) return point.final_pass() ? "validation, final" : "validation";
  return "train";
}

const std::vector<std::string>& Header() {
  static const std::vector<std::string> kHeader = {"KIND",          "ATTEMPT",   "STEP",       "LM LOSS",
                                                   "LEARNING RATE", "GRAD NORM", "LOSS SCALE", "TOKENS/S",
                                                   "MS/ITERATION",  "SKIPPED",   "NAN"};
  return kHeader;
}

std::vector<std::string> Row(const v1::MetricPoint& point) {
  const bool train = point.kind() == v1::METRIC_KIND_TRAIN;
  const auto if_train = [train](const std::string& text) { return train ? text : std::string("-"); };
  return {KindName(point),
          fmt::format("{}", point.attempt()),
          fmt::format("{}", point.step()),
          Number(point.lm_loss(), "{:.6f}"),
          if_train(Number(point.learning_rate(), "{:.6e}")),
          if_train(Number(point.grad_norm(), "{:.4f}")),
          if_train(Number(point.loss_scale(), "{:.1f}")),
          if_train(Number(point.tokens_per_second(), "{:.1f}")),
          if_train(Number(point.elapsed_ms_per_iteration(), "{:.1f}")),
          if_train(fmt::format("{}", point.skipped_iterations())),
          if_train(fmt::format("{}", point.nan_iterations()))};
}

// One row in columns that do not depend on later rows.
std::string StreamedRow(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const size_t width = std::max<size_t>(Header()[i].size(), i == 0 ? 17 : 10);
    line += i == 0 ? fmt::format("{:<{}}", cells[i], width) : fmt::format("  {:>{}}", cells[i], width);
  }
  return line + "\n";
}

double Value(const v1::MetricPoint& point, const std::string& y) {
  if (y == "grad-norm") return point.grad_norm();
  if (y == "learning-rate") return point.learning_rate();
  if (y == "tokens-per-second") return point.tokens_per_second();
  return point.lm_loss();
}

std::string Plot(const Session& session, const std::vector<v1::MetricPoint>& points, const MetricFlags& flags) {
  std::vector<PlotPoint> series;
  for (const v1::MetricPoint& point : points) {
    if (point.kind() != v1::METRIC_KIND_TRAIN) continue;
    series.push_back({static_cast<double>(point.step()), Value(point, flags.y)});
  }
  std::stable_sort(series.begin(), series.end(), [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  PlotOptions options;
  options.title = fmt::format("{} of {}", flags.y, flags.job);
  options.width = session.terminal.width;
  options.unicode = session.terminal.unicode;
  return DrawPlot(series, options);
}

int PrintHistory(Session* session, client::Client* client, const client::Client::MetricQuery& query, const MetricFlags& flags) {
  MBCTL_ASSIGN_OR_FAIL(const auto points, *session, client->ReadMetrics(query));
  if (points.empty()) session->Say("no points yet");
  if (session->json()) {
    for (const v1::MetricPoint& point : points) session->out << ToJson(point, false);
  } else if (session->format == "yaml") {
    v1::StreamMetricsResponse all;
    for (const v1::MetricPoint& point : points) *all.add_points() = point;
    session->out << ToYaml(all);
  } else if (flags.plot) {
    session->out << Plot(*session, points, flags);
  } else {
    Table table(Header());
    for (const v1::MetricPoint& point : points) table.Add(Row(point));
    session->out << table.Text();
  }
  session->out.flush();
  return client::kExitOk;
}

int FollowPoints(Session* session, client::Client* client, const client::Client::MetricQuery& query, const MetricFlags& flags) {
  std::vector<v1::MetricPoint> points;
  size_t drawn_lines = 0;
  auto last_drawn = std::chrono::steady_clock::time_point();
  // In place where the terminal can; a pipe gets the plot once, at the end.
  const bool redraw = session->terminal.out_is_terminal && session->terminal.progress;
  const auto draw = [&] {
    const std::string text = Plot(*session, points, flags);
    if (drawn_lines > 0 && redraw) session->out << fmt::format("\x1b[{}A\x1b[J", drawn_lines);
    session->out << text << std::flush;
    drawn_lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
    last_drawn = std::chrono::steady_clock::now();
  };
  if (!session->json() && !flags.plot) session->out << StreamedRow(Header());
  std::stop_source stop;
  absl::StatusOr<v1::StreamEnd> end = absl::UnknownError("");
  {
    const Interrupt interrupt([&stop](int) { stop.request_stop(); });
    end = client->FollowMetrics(
        query,
        [&](const v1::MetricPoint& point) {
          const std::lock_guard lock(session->mutex());
          if (session->json()) {
            session->out << ToJson(point, false) << std::flush;
          } else if (!flags.plot) {
            session->out << StreamedRow(Row(point)) << std::flush;
          } else {
            points.push_back(point);
            if (redraw && std::chrono::steady_clock::now() - last_drawn >= kRedrawInterval) draw();
          }
        },
        stop.get_token());
  }
  if (flags.plot && !session->json()) draw();
  if (stop.stop_requested() && !end.ok()) {
    SayDetached(session, query.job_id, fmt::format("mbctl metrics -f {}", query.job_id));
    return client::kExitInterrupted;
  }
  return end.ok() ? client::ExitCodeOf(*end) : session->Fail(end.status());
}

}  // namespace

void AddMetrics(CLI::App* app, Session* session) {
  auto flags = std::make_shared<MetricFlags>();
  auto* command = app->add_subcommand("metrics", "Loss, rate and speed of a job: table, JSON lines (-o json), or --plot");
  command->add_option("JOB", flags->job, "Job id or run name")->required();
  command->add_flag("-f,--follow", flags->follow, "Go on until the job has ended; the exit code is the job's");
  command->add_flag("--plot", flags->plot, "Draw it in the terminal");
  command->add_option("--y", flags->y, "What to draw")
      ->check(recipes::OneOf({"loss", "grad-norm", "learning-rate", "tokens-per-second"}))
      ->capture_default_str();
  auto* attempt = command->add_option("--attempt", flags->attempt, "Points of this attempt only")->check(CLI::PositiveNumber);
  command
      ->add_flag("--all-attempts", flags->all_attempts,
                 "Points of repeated steps too; without it the newest attempt of each step")
      ->excludes(attempt);
  command->footer("Examples:\n  mbctl metrics j-0123456789ab --plot\n  mbctl metrics my-run -o json | jq .lmLoss");
  command->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const v1::Job job, *session, FindJob(client, flags->job));
      const client::Client::MetricQuery query = {
          .job_id = job.job_id(), .attempt = flags->attempt, .effective = !flags->all_attempts && flags->attempt == 0};
      return flags->follow ? FollowPoints(session, client, query, *flags) : PrintHistory(session, client, query, *flags);
    };
  });
}

}  // namespace mbridge::mbctl
