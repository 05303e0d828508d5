// Megatron-LM command lines <-> a recipe and overrides, from the flags that config.proto names and the rows below that
// need more than one key. Thread-safe: free functions on values.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mbridge/v1/recipe.pb.h"

namespace mbridge::recipes {

struct Translation {
  std::string recipe;
  std::vector<std::string> overrides;
  int ranks = 0;                   // From --nproc_per_node / --nnodes of torchrun; 0 when the line says nothing.
  std::vector<std::string> notes;  // What was dropped or means something else here, one sentence each.

  // `mbctl submit --recipe ...` quoted for a shell.
  std::string CommandLine() const;
};

// A Megatron-LM argument line, with or without `torchrun ... pretrain_gpt.py` before it. The result resolves to the same
// training: what the line leaves to Megatron-LM's defaults and the recipe has otherwise is overridden too.
// INVALID_ARGUMENT (UNKNOWN_KEY) lists every unknown flag with the nearest one; INVALID_CONFIG every wrong value.
absl::StatusOr<Translation> TranslateFromMegatron(const std::string& line);

// Splits a shell line: quotes and backslashes, a backslash before a line end, comments. INVALID_ARGUMENT: an open quote.
absl::StatusOr<std::vector<std::string>> SplitShellWords(const std::string& line);

struct MegatronLine {
  std::vector<std::string> arguments;  // "--num-layers", "2", ...
  std::vector<std::string> notes;      // Values that Megatron-LM's command line can't express.

  std::string CommandLine() const;  // `pretrain_gpt.py ...` quoted for a shell.
};

// The flags of pretrain_gpt.py for a resolved configuration: every value that is not Megatron-LM's default.
MegatronLine TranslateToMegatron(const v1::ResolvedConfig& resolved);

// A row of the mapping table of docs/megatron-lm.md.
struct FlagRow {
  std::string flag;   // "--num-layers"
  std::string keys;   // "model.num_layers"
  std::string group;  // Table the row belongs to: "model", ...
  std::string note;
};
// Every flag that TranslateFromMegatron understands.
std::vector<FlagRow> FlagRows();

}  // namespace mbridge::recipes
