#include "recipes/config/docs_table.h"

#include <map>
#include <vector>

#include "recipes/config/schema.h"
#include "recipes/config/translate.h"

namespace mbridge::recipes {
namespace {

std::string Code(const std::string& text) { return text.empty() ? "" : "`" + text + "`"; }

// A bar would end the cell.
std::string Cell(const std::string& text) {
  std::string cell;
  for (char c : text) cell += c == '|' ? std::string("\\|") : std::string(1, c);
  return cell;
}

// "a, b" -> "`a`, `b`".
std::string Codes(const std::string& keys) {
  std::string text;
  for (size_t at = 0; at < keys.size();) {
    const size_t end = std::min(keys.find(", ", at), keys.size());
    text += (text.empty() ? "" : ", ") + Code(keys.substr(at, end - at));
    at = end + 2;
  }
  return text;
}

std::vector<std::string> GroupsInOrder() {
  std::vector<std::string> groups;
  for (const Key& key : Schema::Get().keys()) {
    if (!key.group.empty() && (groups.empty() || groups.back() != key.group)) groups.push_back(key.group);
  }
  return groups;
}

}  // namespace

std::string FlagTableMarkdown() {
  std::map<std::string, std::string> tables;
  for (const FlagRow& row : FlagRows()) {
    tables[row.group] +=
        "| " + Code(row.flag) + " | " + (row.keys.empty() ? "–" : Codes(row.keys)) + " | " + Cell(row.note) + " |\n";
  }
  std::string text;
  std::vector<std::string> groups = GroupsInOrder();
  groups.push_back("other");
  for (const std::string& group : groups) {
    if (tables.count(group) == 0) continue;
    text += "#### " + group + "\n\n| Megatron-LM flag | Key | Note |\n|---|---|---|\n" + tables[group] + "\n";
  }
  return text;
}

std::string KeyTableMarkdown() {
  std::string text, open_group;
  for (const Key& key : Schema::Get().keys()) {
    if (!key.Works()) continue;
    if (key.group != open_group) {
      text += (text.empty() ? "" : "\n") + ("#### " + key.group) +
              "\n\n| Key | Type | Allowed | Default | Meaning |\n|---|---|---|---|---|\n";
      open_group = key.group;
    }
    const Value value = key.Default();
    text += "| " + Code(key.name) + " | " + key.TypeName() + " | " + Cell(key.RangeText()) + " | " +
            (value.is_null() ? "" : Code(FormatValue(value))) + " | " + Cell(key.Help()) + " |\n";
  }
  return text;
}

}  // namespace mbridge::recipes
