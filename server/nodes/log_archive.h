// The rank logs as shipped by the agents: <directory>/<job>/<attempt>/rank-N.log, each byte at its offset in the rank's
// own log. A chunk that comes twice changes nothing. Thread-safe (the file system orders appends and reads).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "mbridge/v1/agent_service.pb.h"

namespace mbridge::server {

class LogArchive {
 public:
  explicit LogArchive(std::string directory) : directory_(std::move(directory)) {}

  // A chunk behind a gap is stored only where the agent says that it dropped the bytes between; the gap then begins with
  // a line that says so. Otherwise the agent learns from Size() where to go on.
  absl::Status Append(const std::string& job_id, int32_t attempt, const v1::LogChunk& chunk) const;
  // Offset of the next byte wanted; 0 where there is no log yet.
  int64_t Size(const std::string& job_id, int32_t attempt, int32_t rank) const;

  struct Piece {
    std::string data;
    int64_t offset = 0;  // Of data[0]; larger than asked for behind a gap.
  };
  // At most `limit` bytes from `offset`; empty at the end.
  absl::StatusOr<Piece> Read(const std::string& job_id, int32_t attempt, int32_t rank, int64_t offset, size_t limit) const;

 private:
  std::string Path(const std::string& job_id, int32_t attempt, int32_t rank) const;
  std::string directory_;
};

}  // namespace mbridge::server
