#include "server/scheduler/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace mbridge::server {
namespace {

using std::chrono::seconds;

NodeSlots CpuNode(const std::string& id, int cores) {
  NodeSlots node;
  node.node_id = id;
  node.cpu_cores = cores;
  return node;
}

NodeSlots GpuNode(const std::string& id, int gpus, int free) {
  NodeSlots node = CpuNode(id, 2 * gpus);
  for (int i = 0; i < gpus; ++i) node.gpus.push_back(id + "/gpu" + std::to_string(i));
  node.free_gpus.assign(node.gpus.begin(), node.gpus.begin() + free);
  return node;
}

WaitingJob Job(const std::string& id, int ranks, int age = 0, int priority = 50, v1::Device device = v1::DEVICE_UNSPECIFIED) {
  return {.job_id = id, .ranks = ranks, .device = device, .priority = priority, .age = seconds(age)};
}

TEST(Schedule, CpuJobsOfANodeRunOneAfterTheOther) {
  const Schedule schedule = MakeSchedule({Job("young", 1, 1), Job("old", 2, 5)}, {CpuNode("a", 8)});
  ASSERT_EQ(schedule.placements.size(), 1u);
  EXPECT_EQ(schedule.placements[0].job_id, "old");
  EXPECT_EQ(schedule.placements[0].ranks[1].threads, 4);
  ASSERT_EQ(schedule.waiting.size(), 1u);
  EXPECT_EQ(schedule.waiting[0].position, 1);
  EXPECT_THAT(schedule.waiting[0].detail, ::testing::HasSubstr("takes all cores"));
}

TEST(Schedule, PriorityComesBeforeAge) {
  const Schedule schedule = MakeSchedule({Job("old", 1, 100), Job("urgent", 1, 1, 90)}, {CpuNode("a", 2)});
  ASSERT_EQ(schedule.placements.size(), 1u);
  EXPECT_EQ(schedule.placements[0].job_id, "urgent");
}

TEST(Schedule, GpusAreTakenByUuidOnTheTightestNode) {
  const Schedule schedule = MakeSchedule({Job("j", 2)}, {GpuNode("big", 8, 8), GpuNode("small", 4, 2)});
  ASSERT_EQ(schedule.placements.size(), 1u);
  EXPECT_EQ(schedule.placements[0].device, v1::DEVICE_CUDA);
  EXPECT_EQ(schedule.placements[0].ranks[0].gpu_uuid, "small/gpu0");
  EXPECT_EQ(schedule.placements[0].ranks[1].gpu_uuid, "small/gpu1");
}

TEST(Schedule, AWaitingJobSaysWhatItWaitsFor) {
  Schedule schedule = MakeSchedule({Job("j", 6)}, {GpuNode("a", 8, 4), GpuNode("b", 8, 3)});
  EXPECT_EQ(schedule.waiting[0].detail, "needs 6 GPUs on one node; largest free is 4");
  schedule = MakeSchedule({Job("j", 1)}, {});
  EXPECT_EQ(schedule.waiting[0].reason, v1::REASON_WAITING_FOR_NODE);
  NodeSlots drained = CpuNode("a", 4);
  drained.accepts = false;
  schedule = MakeSchedule({Job("j", 1)}, {drained});
  EXPECT_EQ(schedule.waiting[0].reason, v1::REASON_WAITING_FOR_NODE);
  EXPECT_THAT(schedule.waiting[0].detail, ::testing::HasSubstr("drained"));
}

TEST(Schedule, OnlyAJobLargerThanEveryNodeIsSpread) {
  const Schedule schedule = MakeSchedule({Job("j", 10)}, {GpuNode("a", 8, 4), GpuNode("b", 8, 8)});
  ASSERT_EQ(schedule.placements.size(), 1u);
  EXPECT_EQ(schedule.placements[0].ranks[7].node_id, "b");
  EXPECT_EQ(schedule.placements[0].ranks[8].node_id, "a");
  EXPECT_EQ(schedule.placements[0].ranks[8].local_rank, 0);
}

TEST(Schedule, MoreRanksThanCoresNeverFit) {
  EXPECT_THAT(WhyNeverFits(Job("j", 3), {CpuNode("a", 2)}), ::testing::HasSubstr("needs 3 CPU ranks"));
  EXPECT_THAT(WhyNeverFits(Job("j", 3), {CpuNode("a", 2)}), ::testing::HasSubstr("(a) has 2"));
  EXPECT_EQ(WhyNeverFits(Job("j", 3), {CpuNode("a", 2), CpuNode("b", 1)}), "");
  EXPECT_THAT(WhyNeverFits(Job("j", 1, 0, 50, v1::DEVICE_CUDA), {CpuNode("a", 2)}), ::testing::HasSubstr("needs 1 GPU,"));
}

TEST(Schedule, ALongWaitingLargeJobIsNotStarved) {
  const std::vector<NodeSlots> nodes = {GpuNode("a", 8, 4)};
  Schedule young = MakeSchedule({Job("large", 8, 10), Job("small", 4, 5)}, nodes);
  ASSERT_EQ(young.placements.size(), 1u);
  EXPECT_EQ(young.placements[0].job_id, "small");
  Schedule old = MakeSchedule({Job("large", 8, 601), Job("small", 4, 5)}, nodes);
  EXPECT_TRUE(old.placements.empty());
}

// Random clusters: gang atomicity, no slot twice, nothing on a closed node, no idle-while-fitting.
TEST(Schedule, HoldsItsPromisesOnRandomClusters) {
  std::mt19937 random(1);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < 2000; ++round) {
    std::vector<NodeSlots> nodes;
    for (int i = pick(0, 5); i > 0; --i) {
      const std::string id = "n" + std::to_string(i);
      const int gpus = pick(0, 2) == 0 ? 0 : pick(1, 8);
      nodes.push_back(gpus > 0 ? GpuNode(id, gpus, pick(0, gpus)) : CpuNode(id, pick(1, 16)));
      nodes.back().accepts = pick(0, 5) > 0;
      nodes.back().cpu_busy = pick(0, 2) == 0;
    }
    std::map<std::string, WaitingJob> jobs;
    std::vector<WaitingJob> queue;
    for (int i = pick(0, 8); i > 0; --i) {
      queue.push_back(Job("j" + std::to_string(i), pick(1, 12), pick(0, 500), pick(0, 100), static_cast<v1::Device>(pick(0, 2))));
      jobs[queue.back().job_id] = queue.back();
    }
    const Schedule schedule = MakeSchedule(queue, nodes);
    ASSERT_EQ(schedule.placements.size() + schedule.waiting.size(), queue.size());

    std::set<std::string> gpus_taken, cpu_nodes_taken;
    for (const Placement& placement : schedule.placements) {
      ASSERT_EQ(placement.ranks.size(), static_cast<size_t>(jobs[placement.job_id].ranks)) << "gang";
      std::set<std::string> own_nodes;
      for (const RankSlot& slot : placement.ranks) {
        const auto node = std::find_if(nodes.begin(), nodes.end(), [&](const auto& n) { return n.node_id == slot.node_id; });
        ASSERT_TRUE(node != nodes.end() && node->accepts);
        ASSERT_GE(slot.threads, 1);
        if (placement.device == v1::DEVICE_CUDA) {
          ASSERT_THAT(node->free_gpus, ::testing::Contains(slot.gpu_uuid));
          ASSERT_TRUE(gpus_taken.insert(slot.gpu_uuid).second) << "GPU given twice";
        } else {
          ASSERT_FALSE(node->cpu_busy);
          own_nodes.insert(slot.node_id);
        }
      }
      for (const auto& id : own_nodes) ASSERT_TRUE(cpu_nodes_taken.insert(id).second) << "CPU node given twice";
    }
    // What is left: none of the waiting jobs may fit into it.
    for (NodeSlots& node : nodes) {
      std::erase_if(node.free_gpus, [&](const std::string& uuid) { return gpus_taken.contains(uuid); });
      node.cpu_busy |= cpu_nodes_taken.contains(node.node_id);
    }
    for (const Waiting& waiting : schedule.waiting) {
      ASSERT_FALSE(waiting.detail.empty());
      ASSERT_TRUE(MakeSchedule({jobs[waiting.job_id]}, nodes).placements.empty()) << waiting.job_id << " could have started";
    }
  }
}

}  // namespace
}  // namespace mbridge::server
