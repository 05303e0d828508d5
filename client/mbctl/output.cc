#include "client/mbctl/output.h"

#include <fmt/format.h>
#include <google/protobuf/timestamp.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <set>

#include "proto/format/training_line.h"

namespace mbridge::mbctl {
namespace {

using Json = nlohmann::ordered_json;

bool LooksNumeric(const std::string& cell) {
  if (cell.empty() || cell == "-" || cell == "NaN" || cell == "Inf" || cell == "-Inf") return true;
  return cell.find_first_not_of("0123456789.+-eE/%") == std::string::npos;
}

// YAML needs quotes where a plain word would read as something else.
std::string YamlScalar(const Json& value) {
  if (!value.is_string()) return value.dump();
  const auto text = value.get<std::string>();
  static const std::string kSpecial = ":#{}[],&*!|>'\"%@`\n\t\\";
  static const std::set<std::string> kWords = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  std::string lower = text;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const bool plain = !text.empty() && text.find_first_of(kSpecial) == std::string::npos &&
                     std::string(" -+.?~0123456789=<").find(text.front()) == std::string::npos && text.back() != ' ' &&
                     !kWords.contains(lower);
  return plain ? text : value.dump();
}

void WriteYaml(const Json& value, int indent, std::string* out) {
  const std::string blanks(static_cast<size_t>(indent), ' ');
  const auto nested = [](const Json& child) { return child.is_structured() && !child.empty(); };
  const auto write_child = [&](const Json& child) {
    if (nested(child)) {
      *out += '\n';
      WriteYaml(child, indent + 2, out);
    } else {
      *out += ' ' + (child.is_structured() ? child.dump() : YamlScalar(child)) + '\n';
    }
  };
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) {
      *out += blanks + YamlScalar(Json(key)) + ':';
      write_child(child);
    }
  } else if (value.is_array()) {
    for (const Json& child : value) {
      if (!nested(child)) {
        *out += blanks + "- " + (child.is_structured() ? child.dump() : YamlScalar(child)) + '\n';
        continue;
      }
      std::string block;
      WriteYaml(child, indent + 2, &block);
      block.replace(static_cast<size_t>(indent), 2, "- ");
      *out += block;
    }
  } else {
    *out += blanks + YamlScalar(value) + '\n';
  }
}

}  // namespace

size_t DisplayWidth(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; }));
}

std::string Table::Text() const {
  std::vector<size_t> widths;
  std::vector<bool> right;
  for (size_t column = 0; column < header_.size(); ++column) {
    size_t width = DisplayWidth(header_[column]);
    bool numeric = !rows_.empty();
    for (const auto& row : rows_) {
      width = std::max(width, DisplayWidth(row[column]));
      numeric = numeric && LooksNumeric(row[column]);
    }
    widths.push_back(width);
    right.push_back(numeric);
  }
  std::string text;
  const auto write = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      const std::string fill(widths[column] - DisplayWidth(row[column]), ' ');
      if (column > 0) line += "  ";
      line += right[column] ? fill + row[column] : row[column] + fill;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  };
  write(header_);
  for (const auto& row : rows_) write(row);
  return text;
}

std::string ToJson(const google::protobuf::Message& message, bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = pretty;
  options.always_print_primitive_fields = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return "{}";  // Only for a message with an unknown Any type; there is none in this API.
  if (!pretty) text += '\n';
  return text;
}

std::string JsonToYaml(const std::string& json) {
  std::string text;
  WriteYaml(Json::parse(json), 0, &text);
  return text;
}

std::string ToYaml(const google::protobuf::Message& message) { return JsonToYaml(ToJson(message, false)); }

std::string FormatTime(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  const std::time_t seconds = static_cast<std::time_t>(time.seconds());
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

std::string FormatAge(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  return FormatDuration(std::max(0.0, std::difftime(std::time(nullptr), static_cast<std::time_t>(time.seconds()))));
}

std::string StripPrefix(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

}  // namespace mbridge::mbctl
