// Which waiting job starts where: a pure function of a snapshot. No clock, no lock, no I/O.
//
// Rules:
// - A job starts as a whole or not at all (gang). Jobs are looked at by priority, then age.
// - One rank takes one GPU, chosen by UUID. A CPU job takes every core of its node: threads per rank = cores / ranks, so
//   CPU jobs on one node run one after the other; a second job beside it would only slow both.
// - A job goes to one node where one is large enough; of those to the one that is left with the least free. Only a job
//   that is larger than every node is spread, over the fewest nodes, ranks contiguous.
// - A job that does not fit now does not hold back smaller ones behind it that do (no slot idles while a waiting job
//   fits), until it has waited `kReserveAfter`: then the slots that become free are kept for it, so that it cannot starve.
// - Drained and unreachable nodes take nothing new; a job that only they could hold waits and says so.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "mbridge/v1/node.pb.h"
#include "mbridge/v1/reason.pb.h"

namespace mbridge::server {

inline constexpr std::chrono::seconds kReserveAfter{600};

struct WaitingJob {
  std::string job_id;
  int ranks = 1;
  v1::Device device = v1::DEVICE_UNSPECIFIED;  // UNSPECIFIED: GPUs where any node has some, else CPU.
  int priority = 50;                           // Higher first.
  std::chrono::nanoseconds age{0};             // Since it was queued; older first.
};

struct NodeSlots {
  std::string node_id;
  int cpu_cores = 0;
  bool cpu_busy = false;               // A CPU job has the cores.
  std::vector<std::string> gpus;       // UUIDs of all.
  std::vector<std::string> free_gpus;  // UUIDs of those without a job.
  bool accepts = true;                 // Neither drained nor unreachable.
};

struct RankSlot {
  std::string node_id;
  int local_rank = 0;
  std::string gpu_uuid;  // Empty on the CPU.
  int threads = 1;
};

struct Placement {
  std::string job_id;
  v1::Device device = v1::DEVICE_CPU;
  std::vector<RankSlot> ranks;  // Index = rank.
};

struct Waiting {
  std::string job_id;
  v1::Reason reason = v1::REASON_WAITING_FOR_SLOTS;
  std::string detail;  // "needs 6 GPUs on one node; largest free is 4"
  int position = 0;    // 1 = next.
};

struct Schedule {
  std::vector<Placement> placements;
  std::vector<Waiting> waiting;
};

Schedule MakeSchedule(std::vector<WaitingJob> jobs, std::vector<NodeSlots> nodes);

// Whether the nodes, all idle and reachable, could hold the job. "" = yes, else the reason with the largest node named.
std::string WhyNeverFits(const WaitingJob& job, const std::vector<NodeSlots>& nodes);

}  // namespace mbridge::server
