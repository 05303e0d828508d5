#include "server/scheduler/schedule.h"

#include <fmt/format.h>

#include <algorithm>

namespace mbridge::server {
namespace {

bool HasGpus(const std::vector<NodeSlots>& nodes) {
  return std::any_of(nodes.begin(), nodes.end(), [](const NodeSlots& node) { return !node.gpus.empty(); });
}

v1::Device DeviceOf(const WaitingJob& job, const std::vector<NodeSlots>& nodes) {
  if (job.device != v1::DEVICE_UNSPECIFIED) return job.device;
  return HasGpus(nodes) ? v1::DEVICE_CUDA : v1::DEVICE_CPU;
}

// Ranks that a node can hold at all, and now.
int Capacity(const NodeSlots& node, v1::Device device) {
  return device == v1::DEVICE_CUDA ? static_cast<int>(node.gpus.size()) : node.cpu_cores;
}

int Free(const NodeSlots& node, v1::Device device) {
  if (!node.accepts) return 0;
  if (device == v1::DEVICE_CUDA) return static_cast<int>(node.free_gpus.size());
  return node.cpu_busy ? 0 : node.cpu_cores;
}

const NodeSlots* Largest(const std::vector<NodeSlots>& nodes, v1::Device device) {
  const auto largest = std::max_element(
      nodes.begin(), nodes.end(), [device](const auto& a, const auto& b) { return Capacity(a, device) < Capacity(b, device); });
  return largest == nodes.end() ? nullptr : &*largest;
}

bool FitsOneNode(int ranks, const std::vector<NodeSlots>& nodes, v1::Device device) {
  const NodeSlots* largest = Largest(nodes, device);
  return largest != nullptr && Capacity(*largest, device) >= ranks;
}

// The nodes that take the job now and how many ranks each; empty when it does not fit.
struct Share {
  NodeSlots* node;
  int ranks;
};

std::vector<Share> Choose(int ranks, std::vector<NodeSlots>* nodes, v1::Device device) {
  std::vector<NodeSlots*> order;
  for (NodeSlots& node : *nodes) {
    if (Free(node, device) > 0) order.push_back(&node);
  }
  if (FitsOneNode(ranks, *nodes, device)) {
    NodeSlots* tightest = nullptr;
    for (NodeSlots* node : order) {
      if (Free(*node, device) < ranks) continue;
      if (tightest == nullptr || Free(*node, device) < Free(*tightest, device)) tightest = node;
    }
    if (tightest == nullptr) return {};
    return {{tightest, ranks}};
  }
  std::stable_sort(order.begin(), order.end(),
                   [device](const NodeSlots* a, const NodeSlots* b) { return Free(*a, device) > Free(*b, device); });
  std::vector<Share> shares;
  int left = ranks;
  for (NodeSlots* node : order) {
    if (left == 0) break;
    shares.push_back({node, std::min(left, Free(*node, device))});
    left -= shares.back().ranks;
  }
  if (left > 0) return {};
  return shares;
}

// Takes the slots out of the snapshot.
Placement Take(const WaitingJob& job, const std::vector<Share>& shares, v1::Device device) {
  Placement placement{.job_id = job.job_id, .device = device, .ranks = {}};
  for (const auto& [node, ranks] : shares) {
    const int threads = std::max(1, node->cpu_cores / std::max(ranks, Capacity(*node, device) * (device == v1::DEVICE_CUDA)));
    for (int local = 0; local < ranks; ++local) {
      RankSlot slot{.node_id = node->node_id, .local_rank = local, .gpu_uuid = {}, .threads = threads};
      if (device == v1::DEVICE_CUDA) slot.gpu_uuid = node->free_gpus[local];
      placement.ranks.push_back(std::move(slot));
    }
    if (device == v1::DEVICE_CUDA) {
      node->free_gpus.erase(node->free_gpus.begin(), node->free_gpus.begin() + ranks);
    } else {
      node->cpu_busy = true;
    }
  }
  return placement;
}

// Keeps for `job` what it waits for: every slot of the node that is nearest to holding it, or of all nodes.
void Reserve(const WaitingJob& job, std::vector<NodeSlots>* nodes, v1::Device device) {
  const bool one_node = FitsOneNode(job.ranks, *nodes, device);
  NodeSlots* nearest = nullptr;
  for (NodeSlots& node : *nodes) {
    if (!node.accepts || (one_node && Capacity(node, device) < job.ranks)) continue;
    if (!one_node) {
      node.accepts = false;
    } else if (nearest == nullptr || Free(node, device) > Free(*nearest, device)) {
      nearest = &node;
    }
  }
  if (nearest != nullptr) nearest->accepts = false;
}

std::string Slots(int count, v1::Device device) {
  if (device == v1::DEVICE_CUDA) return fmt::format("{} GPU{}", count, count == 1 ? "" : "s");
  return fmt::format("{} CPU rank{}", count, count == 1 ? "" : "s");
}

Waiting Explain(const WaitingJob& job, const std::vector<NodeSlots>& nodes, v1::Device device) {
  Waiting waiting;
  waiting.job_id = job.job_id;
  int largest_free = 0, total_free = 0, accepting = 0;
  for (const NodeSlots& node : nodes) {
    accepting += node.accepts;
    largest_free = std::max(largest_free, Free(node, device));
    total_free += Free(node, device);
  }
  if (accepting == 0) {
    waiting.reason = v1::REASON_WAITING_FOR_NODE;
    waiting.detail = nodes.empty() ? "no node has connected yet" : "every node is drained or unreachable";
  } else if (const std::string never = WhyNeverFits(job, nodes); !never.empty()) {
    waiting.detail = never;
  } else if (device == v1::DEVICE_CPU && largest_free == 0) {
    waiting.detail = "waits for a CPU node: a CPU job takes all cores of its node";
  } else if (FitsOneNode(job.ranks, nodes, device)) {
    waiting.detail = fmt::format("needs {} on one node; largest free is {}", Slots(job.ranks, device), largest_free);
  } else {
    waiting.detail = fmt::format("needs {}; {} free", Slots(job.ranks, device), total_free);
  }
  return waiting;
}

}  // namespace

Schedule MakeSchedule(std::vector<WaitingJob> jobs, std::vector<NodeSlots> nodes) {
  std::stable_sort(jobs.begin(), jobs.end(), [](const WaitingJob& a, const WaitingJob& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.age > b.age;
  });
  Schedule schedule;
  for (const WaitingJob& job : jobs) {
    const v1::Device device = DeviceOf(job, nodes);
    if (const auto shares = Choose(job.ranks, &nodes, device); !shares.empty()) {
      schedule.placements.push_back(Take(job, shares, device));
      continue;
    }
    schedule.waiting.push_back(Explain(job, nodes, device));
    schedule.waiting.back().position = static_cast<int>(schedule.waiting.size());
    if (job.age >= kReserveAfter && WhyNeverFits(job, nodes).empty()) Reserve(job, &nodes, device);
  }
  return schedule;
}

std::string WhyNeverFits(const WaitingJob& job, const std::vector<NodeSlots>& nodes) {
  const v1::Device device = DeviceOf(job, nodes);
  int total = 0;
  for (const NodeSlots& node : nodes) total += Capacity(node, device);
  if (total >= job.ranks && job.ranks > 0) return {};
  const NodeSlots* largest = Largest(nodes, device);
  return fmt::format("needs {}, but {} node{} together {} {}; the largest{} has {}", Slots(job.ranks, device), nodes.size(),
                     nodes.size() == 1 ? "" : "s", nodes.size() == 1 ? "has" : "have",
                     device == v1::DEVICE_CUDA ? Slots(total, device) : fmt::format("{} cores (one rank each)", total),
                     largest == nullptr ? "" : " (" + largest->node_id + ")",
                     largest == nullptr ? 0 : Capacity(*largest, device));
}

}  // namespace mbridge::server
