// Key-value exchange of the ranks of an attempt: one file a key, replaced atomically, never removed.
//
// The ranks of a node share the directory; between nodes the agents relay it through the coordinator. A rank waits for a
// key by polling Get (5 ms is fine). Keys may hold any bytes; the file name is the key with all bytes but letters,
// digits, '-' and '_' written as %XX. Thread-safe and safe between processes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mbridge::spool {

class RendezvousDirectory {
 public:
  // Creates the directory where it is missing.
  static absl::StatusOr<RendezvousDirectory> Open(const std::string& path);

  // INVALID_ARGUMENT for an empty or too long key (file name above 200 bytes).
  absl::Status Set(const std::string& key, const std::string& value) const;
  // nullopt while nobody has set it.
  absl::StatusOr<std::optional<std::string>> Get(const std::string& key) const;
  // Keys in no order.
  absl::StatusOr<std::vector<std::string>> Keys() const;

 private:
  explicit RendezvousDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace mbridge::spool
