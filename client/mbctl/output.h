// How results are printed: tables for people; proto JSON and YAML for programs.
#pragma once

#include <string>
#include <vector>

namespace google::protobuf {
class Message;
class Timestamp;
}  // namespace google::protobuf

namespace mbridge::mbctl {

// Left-aligned columns two blanks apart; a column whose cells all look like numbers is right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  // One line a row, each with its line feed.
  std::string Text() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// The proto JSON form with defaults written out. `pretty`: indented, for one object; else one line, for streams.
std::string ToJson(const google::protobuf::Message& message, bool pretty);
// The same content as block YAML.
std::string ToYaml(const google::protobuf::Message& message);
// Any JSON text as block YAML.
std::string JsonToYaml(const std::string& json);

// "2026-11-30 00:30:31" in local time; "-" for an unset time.
std::string FormatTime(const google::protobuf::Timestamp& time);
// "5m12s" since `time`; "-" for an unset time.
std::string FormatAge(const google::protobuf::Timestamp& time);
// "RUNNING" for JOB_STATE_RUNNING with prefix "JOB_STATE_".
std::string StripPrefix(const std::string& name, const std::string& prefix);
// Columns that a UTF-8 text takes (every code point counts one).
size_t DisplayWidth(const std::string& text);

}  // namespace mbridge::mbctl
