// Reads Python pickles as data: a machine for the opcodes that torch.save and pickle.dump (protocols 2 to 5) write. Objects are
// kept as name, arguments and state. A class or function that is not in the list of known ones is refused by name, so that what
// a file holds beyond numbers and plain containers is never passed over. Opcodes: Lib/pickletools.py of Python.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/megatron/pickle_value.h"

namespace mbridge {

struct PickleLimits {
  int64_t values = 8'000'000;  // Values in memory.
  int64_t depth = 1000;        // Open containers.
};

// `where` names the file in messages. DATA_LOSS for bytes that are no pickle or above a limit; INVALID_ARGUMENT
// (UNSUPPORTED_MODEL) naming the refused class, function or opcode.
absl::StatusOr<Pickle> ReadPickle(std::string_view bytes, const std::string& where, const PickleLimits& limits = {});

// Whether the reader knows "module name".
bool IsKnownGlobal(std::string_view global);

}  // namespace mbridge
