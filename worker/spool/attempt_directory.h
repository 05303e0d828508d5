// The files of one attempt of a job on a node, <state>/attempts/<job>.<attempt>/:
//
//   rank-<r>.spec    RankSpec, by the agent          rank-<r>.log     stdout and stderr of the rank
//   rank-<r>.proc    ProcessRecord, by the shim      events.spool     RankRecords of rank 0
//   rank-<r>.exit    ExitRecord, by the shim         rdzv/            rendezvous keys, see rendezvous_directory.h
//   rank-<r>.reason  RankResult, by the rank
//   pulses           memory shared by the ranks, see engine/core/watchdog.h
//   rank-<r>.stop    RankResult: why the agent stops the rank, written before its first signal
#pragma once

#include <string>
#include <vector>

namespace mbridge::spool {

class AttemptDirectory {
 public:
  explicit AttemptDirectory(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string SpecPath(int rank) const { return RankPath(rank, "spec"); }
  std::string ProcessPath(int rank) const { return RankPath(rank, "proc"); }
  std::string ExitPath(int rank) const { return RankPath(rank, "exit"); }
  std::string ResultPath(int rank) const { return RankPath(rank, "reason"); }
  std::string StopPath(int rank) const { return RankPath(rank, "stop"); }
  std::string LogPath(int rank) const { return RankPath(rank, "log"); }
  std::string PulsePath() const { return path_ + "/pulses"; }
  std::string SpoolPath() const { return path_ + "/events.spool"; }
  std::string RendezvousPath() const { return path_ + "/rdzv"; }

  // Ranks that have a specification, ascending.
  std::vector<int> Ranks() const;
  // Ranks that have any file here, ascending.
  std::vector<int> RanksWithFiles() const;

 private:
  std::string RankPath(int rank, const char* extension) const;

  std::string path_;
};

}  // namespace mbridge::spool
