// Plots, progress line, tables and the rules on terminals.
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/mbctl/output.h"
#include "client/mbctl/plot.h"
#include "client/mbctl/progress_line.h"
#include "client/mbctl/terminal.h"
#include "mbridge/v1/job.pb.h"

namespace mbridge::mbctl {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Plot, FallingLineGoesFromTopLeftToBottomRight) {
  std::vector<PlotPoint> points;
  for (int i = 0; i <= 50; ++i) points.push_back({double(i), 10.0 - i * 0.1});
  const auto lines = Lines(DrawPlot(points, {.title = "loss", .width = 60, .height = 8, .unicode = false}));
  ASSERT_EQ(lines.size(), 10u);  // Title, 8 rows, x axis.
  EXPECT_EQ(lines[0], "loss");
  EXPECT_EQ(lines[1].substr(0, 13), "        10 |*");
  EXPECT_EQ(lines[8].substr(0, 12), "         5 |");
  EXPECT_EQ(lines[8].back(), '*');
  EXPECT_EQ(lines[8].size(), 60u);
  EXPECT_LT(lines[1].size(), 30u);
  EXPECT_EQ(lines[9].substr(12, 1), "0");
  EXPECT_TRUE(lines[9].ends_with("50"));
}

TEST(Plot, BrailleStaysWithinTheWidth) {
  std::vector<PlotPoint> points;
  for (int i = 0; i < 500; ++i) points.push_back({double(i), std::sin(i / 20.0)});
  const std::string text = DrawPlot(points, {.title = "", .width = 70, .height = 10});
  EXPECT_NE(text.find("\xE2\xA0"), std::string::npos);  // U+2800..U+283F.
  for (const std::string& line : Lines(text)) EXPECT_LE(DisplayWidth(line), 70u) << line;
}

TEST(Plot, SinglePointConstantAndNothing) {
  EXPECT_NE(DrawPlot({{1, 5}}, {}).find('5'), std::string::npos);
  EXPECT_NE(DrawPlot({{1, 5}, {2, 5}}, {.title = "", .unicode = false}).find('*'), std::string::npos);
  EXPECT_EQ(DrawPlot({}, {}), "no points\n");
  EXPECT_EQ(DrawPlot({{1, std::nan("")}}, {}), "no points but NaN or Inf\n");
}

TEST(Plot, NanIsSaid) {
  const std::string text = DrawPlot({{1, 3}, {2, std::nan("")}, {3, 2}}, {.title = "", .unicode = false});
  EXPECT_NE(text.find("1 points are NaN or Inf and not drawn"), std::string::npos);
}

v1::MetricPoint Point() {
  v1::MetricPoint point;
  point.set_step(5);
  point.set_total_steps(10);
  point.set_lm_loss(9.97476);
  point.set_tokens_per_second(114810);
  point.set_eta_seconds(42);
  return point;
}

TEST(Progress, SaysWhereTheJobIs) {
  EXPECT_EQ(FormatProgress("running", Point(), 200, false).find("running  5/10 [##########----------]  loss 9.9748  "), 0u);
  EXPECT_NE(FormatProgress("running", Point(), 200, false).find("ETA 42s"), std::string::npos);
  EXPECT_EQ(FormatProgress("queued", v1::MetricPoint(), 200, false), "queued");
  v1::MetricPoint nan = Point();
  nan.set_lm_loss(std::nan(""));
  EXPECT_NE(FormatProgress("running", nan, 200, true).find("loss NaN"), std::string::npos);
  for (int width : {20, 40, 60}) EXPECT_LT(DisplayWidth(FormatProgress("running", Point(), width, true)), size_t(width));
}

TEST(Progress, RedrawsAtMostFiveTimesASecondAndOnlyOnATerminal) {
  std::ostringstream err;
  Terminal terminal;
  terminal.progress = true;
  ProgressLine line(err, terminal);
  const auto start = ProgressLine::Clock::now();
  for (int ms = 0; ms < 1000; ms += 10) line.Update("running", Point(), start + std::chrono::milliseconds(ms));
  const std::string text = err.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 5);
  line.Clear();
  EXPECT_TRUE(err.str().ends_with("\r\x1b[K"));

  std::ostringstream pipe;
  ProgressLine plain(pipe, Terminal());
  plain.Update("running", Point());
  plain.Clear();
  EXPECT_EQ(pipe.str(), "");
}

Terminal Describe(const std::map<std::string, std::string>& values, bool terminal = true, int width = 0) {
  return DescribeTerminal(terminal, terminal, terminal, width, [values](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

TEST(TerminalRules, ColourAndProgress) {
  EXPECT_TRUE(Describe({}).color);
  EXPECT_TRUE(Describe({}).progress);
  EXPECT_FALSE(Describe({}, false).color);
  EXPECT_FALSE(Describe({}, false).progress);
  EXPECT_FALSE(Describe({{"NO_COLOR", "1"}}).color);
  EXPECT_FALSE(Describe({{"NO_COLOR", "1"}, {"FORCE_COLOR", "1"}}).color);
  EXPECT_TRUE(Describe({{"NO_COLOR", "1"}}).progress);
  EXPECT_FALSE(Describe({{"TERM", "dumb"}}).color);
  EXPECT_FALSE(Describe({{"TERM", "dumb"}}).progress);
  EXPECT_TRUE(Describe({{"FORCE_COLOR", "1"}}, false).color);
}

TEST(TerminalRules, WidthAndUnicode) {
  EXPECT_EQ(Describe({}).width, 80);
  EXPECT_EQ(Describe({}, true, 132).width, 132);
  EXPECT_EQ(Describe({{"COLUMNS", "100"}}, true, 132).width, 100);
  EXPECT_EQ(Describe({{"COLUMNS", "3"}}).width, 20);
  EXPECT_EQ(Describe({{"COLUMNS", "many"}}).width, 80);
  EXPECT_TRUE(Describe({{"LANG", "C.UTF-8"}}).unicode);
  EXPECT_FALSE(Describe({{"LANG", "de_DE.UTF-8"}, {"LC_ALL", "C"}}).unicode);
  EXPECT_FALSE(Describe({}).unicode);
}

TEST(Table, AlignsNumbersRight) {
  Table table({"NAME", "STEP"});
  table.Add({"a", "7"});
  table.Add({"long-name", "1234"});
  EXPECT_EQ(table.Text(), "NAME       STEP\na             7\nlong-name  1234\n");
}

v1::Job ExampleJob() {
  v1::Job job;
  job.set_job_id("j-1");
  job.set_state(v1::JOB_STATE_RUNNING);
  job.mutable_spec()->add_overrides("train.train_iters=10");
  job.mutable_spec()->add_overrides("x=[1,2]");
  job.mutable_progress()->set_lm_loss(std::nan(""));
  job.add_attempts()->set_attempt(1);
  return job;
}

TEST(Json, IsTheProtoFormWithDefaults) {
  const auto json = nlohmann::json::parse(ToJson(ExampleJob(), true));
  EXPECT_EQ(json["jobId"], "j-1");
  EXPECT_EQ(json["state"], "JOB_STATE_RUNNING");
  EXPECT_EQ(json["progress"]["lmLoss"], "NaN");
  EXPECT_EQ(json["restarts"], 0);
  const std::string line = ToJson(ExampleJob(), false);
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  v1::Job back;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(line, &back).ok());
  EXPECT_EQ(back.spec().overrides(1), "x=[1,2]");
}

TEST(Yaml, QuotesWhatWouldReadAsSomethingElse) {
  EXPECT_EQ(JsonToYaml(R"({"a":"text","b":"1","c":1,"d":["x","- y"],"e":{},"f":[{"g":1,"h":"true"}],"i":"a: b","j":null})"),
            "a: text\nb: \"1\"\nc: 1\nd:\n  - x\n  - \"- y\"\ne: {}\nf:\n  - g: 1\n    h: \"true\"\ni: \"a: b\"\nj: null\n");
}

}  // namespace
}  // namespace mbridge::mbctl
