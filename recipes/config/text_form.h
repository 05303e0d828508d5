// A resolved configuration as text. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "mbridge/v1/recipe.pb.h"

namespace mbridge::recipes {

// XXH3-64, 16 hexadecimal digits, over ranks and all `key=value` lines that are not null (keys of later versions: not the
// default).
std::string ConfigHash(const v1::ConfigContainer& config, int ranks);

// A --config file with every value, complete by itself: resolving it (with or without the recipe) gives the same hash.
std::string ToYaml(const v1::ResolvedConfig& resolved);

// The key=value overrides that, put after the recipe's name, give this configuration again.
std::vector<std::string> ToOverrides(const v1::ResolvedConfig& resolved);
// The same as one line, quoted for a shell.
std::string ToOverrideText(const v1::ResolvedConfig& resolved);

// A few lines for people: size of the model, batch, tokens, FLOPs, bytes per rank.
std::string RunSummary(const v1::ResolvedConfig& resolved);

// "1.5 GiB", "9.9 M".
std::string FormatBytes(int64_t bytes);
std::string FormatCount(double count);

// One argument for a POSIX shell, quoted where needed.
std::string ShellQuote(const std::string& argument);

}  // namespace mbridge::recipes
