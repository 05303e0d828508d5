#include "recipes/config/text_form.h"

#include <xxhash.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "mbridge/v1/config.pb.h"
#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

std::string YamlValue(const Value& value) {
  switch (value.kind) {
    case Value::Kind::kString: {
      // YAML's own quoting rules are many: only plain words of letters stay unquoted.
      const bool plain = !value.text.empty() && ParseWord(value.text).kind == Value::Kind::kString &&
                         value.text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./") ==
                             std::string::npos &&
                         std::isalpha(static_cast<unsigned char>(value.text[0]));
      return plain ? value.text : nlohmann::json(value.text).dump();
    }
    case Value::Kind::kList: {
      std::string text = "[";
      for (const Value& item : value.list) text += (text.size() > 1 ? ", " : "") + YamlValue(item);
      return text + "]";
    }
    case Value::Kind::kMap: {
      std::string text = "{";
      for (const auto& [key, item] : value.map)
        text += (text.size() > 1 ? ", " : "") + nlohmann::json(key).dump() + ": " + nlohmann::json(item.text).dump();
      return text + "}";
    }
    default: return FormatValue(value);
  }
}

std::string Printed(const char* format, double number, const char* unit) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, number, unit);
  return buffer;
}

bool FromUser(v1::Origin origin) { return origin == v1::ORIGIN_FILE || origin == v1::ORIGIN_OVERRIDE; }

}  // namespace

std::string ConfigHash(const v1::ConfigContainer& config, int ranks) {
  std::string canonical = "ranks=" + std::to_string(ranks) + "\n";
  for (const Key& key : Schema::Get().keys()) {
    const Value value = ReadKey(config, key);
    // A planned key at its default is the same training as without it.
    if (!key.Works() && value == key.Default()) continue;
    if (!value.is_null()) canonical += key.path + "=" + FormatValue(value) + "\n";
  }
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(canonical.data(), canonical.size())));
  return buffer;
}

std::string ToYaml(const v1::ResolvedConfig& resolved) {
  std::map<std::string, const v1::ResolvedValue*> values;
  for (const v1::ResolvedValue& value : resolved.values()) values[value.key()] = &value;
  std::string text = "# Resolved from " + (resolved.recipe().empty() ? std::string("the schema defaults") : resolved.recipe()) +
                     ", " + std::to_string(resolved.ranks()) + (resolved.ranks() == 1 ? " rank" : " ranks") + ", hash " +
                     resolved.config_hash() + "\n";
  std::string open_group;
  for (const Key& key : Schema::Get().keys()) {
    const Value value = ReadKey(resolved.config(), key);
    const auto known = values.find(key.path);
    // A null that somebody wrote is kept, so that it still hides a recipe's value.
    if (value.is_null() && known == values.end()) continue;
    const size_t dot = key.path.rfind('.');
    const std::string group = dot == std::string::npos ? "" : key.path.substr(0, dot);
    if (group != open_group) {
      const bool nested = group.find('.') != std::string::npos;
      if (nested && open_group != group.substr(0, group.find('.'))) text += group.substr(0, group.find('.')) + ":\n";
      text += nested ? "  " + group.substr(group.find('.') + 1) + ":\n" : group + ":\n";
      open_group = group;
    }
    const std::string indent(group.empty() ? 0 : group.find('.') == std::string::npos ? 2 : 4, ' ');
    text += indent + key.name + ": " + YamlValue(value) + "\n";
  }
  return text;
}

std::vector<std::string> ToOverrides(const v1::ResolvedConfig& resolved) {
  std::vector<std::string> overrides;
  for (const v1::ResolvedValue& value : resolved.values()) {
    if (FromUser(value.origin())) overrides.push_back(value.key() + "=" + value.value());
  }
  return overrides;
}

std::string ToOverrideText(const v1::ResolvedConfig& resolved) {
  std::string text;
  for (const std::string& line : ToOverrides(resolved)) text += (text.empty() ? "" : " ") + ShellQuote(line);
  return text;
}

std::string RunSummary(const v1::ResolvedConfig& resolved) {
  const v1::ConfigContainer& config = resolved.config();
  const v1::MemoryEstimate& memory = resolved.per_rank();
  const double tokens =
      static_cast<double>(config.train().global_batch_size()) * static_cast<double>(config.model().seq_length());
  const double iterations = static_cast<double>(config.train().train_iters());
  std::string text;
  text += "model       " + FormatCount(static_cast<double>(memory.parameters())) + " parameters, " +
          std::to_string(config.model().num_layers()) + " layers, hidden " + std::to_string(config.model().hidden_size()) +
          ", vocabulary " + std::to_string(config.model().vocab_size()) + ", " + config.model().params_dtype() + "\n";
  text += "batch       " + std::to_string(config.train().global_batch_size()) + " samples of " +
          std::to_string(config.model().seq_length()) + " tokens, micro batch " +
          std::to_string(config.train().micro_batch_size()) + ", " + std::to_string(resolved.ranks()) +
          (resolved.ranks() == 1 ? " rank" : " ranks") + ", data parallel " + std::to_string(resolved.data_parallel_size()) +
          "\n";
  text += "training    " + std::to_string(config.train().train_iters()) + " iterations, " + FormatCount(tokens * iterations) +
          " tokens, " + FormatCount(tokens * iterations * static_cast<double>(resolved.flops_per_token())) + "FLOP\n";
  const int64_t sum = memory.weight_bytes() + memory.gradient_bytes() + memory.optimizer_bytes() + memory.activation_bytes() +
                      memory.workspace_bytes() + memory.runtime_bytes();
  text += "per rank    " + FormatBytes(sum) + ": weights " + FormatBytes(memory.weight_bytes()) + ", gradients " +
          FormatBytes(memory.gradient_bytes()) + ", optimizer " + FormatBytes(memory.optimizer_bytes()) + ", activations " +
          FormatBytes(memory.activation_bytes()) + ", workspace " + FormatBytes(memory.workspace_bytes()) +
          (memory.runtime_bytes() > 0 ? ", CUDA and libraries " + FormatBytes(memory.runtime_bytes()) : std::string()) + "\n";
  text += "checkpoint  " + FormatBytes(memory.checkpoint_bytes()) + "\n";
  return text;
}

std::string FormatBytes(int64_t bytes) {
  static const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double amount = static_cast<double>(bytes);
  int unit = 0;
  while (amount >= 1024 && unit < 5) {
    amount /= 1024;
    ++unit;
  }
  return Printed(unit == 0 ? "%.0f %s" : "%.1f %s", amount, kUnits[unit]);
}

std::string FormatCount(double count) {
  static const char* kUnits[] = {"", "k", "M", "G", "T", "P", "E", "Z", "Y"};
  int unit = 0;
  while (count >= 1000 && unit < 8) {
    count /= 1000;
    ++unit;
  }
  return Printed(unit == 0 ? "%.0f%s" : "%.2f %s", count, kUnits[unit]);
}

std::string ShellQuote(const std::string& argument) {
  const bool plain =
      !argument.empty() &&
      argument.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%") == std::string::npos;
  if (plain) return argument;
  std::string quoted = "'";
  for (char c : argument) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace mbridge::recipes
