// What of an attempt's spool and logs still has to reach the coordinator. Bounded memory however far that is behind.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>

#include "mbridge/v1/agent_service.pb.h"
#include "worker/spool/record_file.h"
#include "worker/spool/rendezvous_directory.h"

namespace mbridge::agent {

// Bytes that one Sync may still carry; shared by the attempts of a node.
struct Budget {
  int64_t records = 1 << 20;
  int64_t logs = 512 << 10;
};

// Records after the last acknowledged one. Not thread-safe.
class RecordFeed {
 public:
  explicit RecordFeed(std::string path) : path_(std::move(path)) {}

  // Nothing is sent before the first acknowledgement: a restarted agent does not know what the coordinator has.
  void Acknowledge(uint64_t sequence);
  // Adds what is next; true when nothing whole is left behind it.
  bool Fill(v1::AttemptReport* report, Budget* budget);

 private:
  void ReadAhead(int64_t bytes);
  void Push(v1::RankRecord record);

  const std::string path_;
  std::unique_ptr<spool::RecordReader> reader_;
  std::deque<v1::RankRecord> pending_;
  int64_t pending_bytes_ = 0;
  bool at_end_ = false;
  bool acknowledged_once_ = false;
  uint64_t acknowledged_ = 0;
  uint64_t last_read_ = 0;
};

// Bytes of one rank's log after the acknowledged offset. A log that grows faster than it can be shipped loses its middle,
// counted in dropped_bytes. Of what was acknowledged the file keeps the last 256 MiB; the blocks of the rest are freed, so
// that a runaway log does not fill the disk. Not thread-safe.
class LogFeed {
 public:
  LogFeed(int rank, std::string path) : rank_(rank), path_(std::move(path)) {}

  void Acknowledge(int64_t offset);
  bool Fill(v1::AttemptReport* report, Budget* budget);

 private:
  void FreeOldBlocks(int64_t size);

  const int rank_;
  const std::string path_;
  bool acknowledged_once_ = false;
  int64_t acknowledged_ = 0;
  int64_t freed_ = 0;  // Blocks before this offset are free.
};

// Keys of an attempt on several nodes: local ones to the coordinator, the other nodes' ones into the directory.
class RendezvousRelay {
 public:
  explicit RendezvousRelay(std::string path) : path_(std::move(path)) {}

  void Fill(v1::AttemptReport* report, Budget* budget);
  // The Sync that carried the last Fill was answered.
  void Delivered();
  // Another coordinator: it may know none of the keys.
  void SendAllAgain();
  void Store(const v1::AttemptOrder& order);

 private:
  const std::string path_;
  std::set<std::string> foreign_;
  std::set<std::string> delivered_;
  std::set<std::string> in_flight_;
};

}  // namespace mbridge::agent
