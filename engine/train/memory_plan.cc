#include "engine/train/memory_plan.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"
#include "engine/optim/optimizer.h"
#include "engine/train/train_state.h"
#include "mbridge/v1/config.pb.h"
#include "proto/format/memory_table.h"

namespace mbridge {
namespace {

// Stands for a group of which only rank and size are asked.
class PlannedGroup : public Communicator {
 public:
  explicit PlannedGroup(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void AllReduce(const Tensor&, ReduceOp) override { Refuse(); }
  void ReduceScatter(const Tensor&, const Tensor&) override { Refuse(); }
  void AllGather(const Tensor&, const Tensor&) override { Refuse(); }
  void Broadcast(const Tensor&, int) override { Refuse(); }
  void Barrier() override { Refuse(); }
  std::unique_ptr<Communicator> Split(const std::vector<int>&, const std::string&) override { Refuse(); }

 private:
  [[noreturn]] static void Refuse() { ThrowEngineError("a collective of a group that is only planned"); }
  int size_;
};

using Lines = std::vector<std::string>;

constexpr const char* kSharded = "ddp.use_distributed_optimizer=true";

// Lines that save memory, of which the configuration does not have the effect yet, cheapest in speed first.
std::vector<Lines> ChangesFor(const v1::ConfigContainer& config, int data_parallel) {
  std::vector<Lines> changes;
  if (data_parallel > 1 && !config.ddp().use_distributed_optimizer()) changes.push_back({kSharded});
  if (config.train().micro_batch_size() > 1) changes.push_back({"train.micro_batch_size=1"});
  if (config.model().bf16() && config.optimizer().exp_avg_dtype() != "bf16") {
    changes.push_back(
        {"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"});
  }
  if (config.model().recompute_granularity() != "full") {
    changes.push_back({"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"});
  }
  return changes;
}

struct Layout {
  unsigned changes = 0;  // Bits of those made.
  int64_t tensor_parallel = 1;
  int64_t growth = 1;  // As many times the data-parallel ranks, the optimizer sharded over them.
  int64_t ranks = 1;
  bool too_many_ranks = false;  // For the GPUs that are there.
  std::string text;
};

// Need of a rank; -1 where the engine does not build it.
int64_t NeedOf(const v1::ResolvedConfig& resolved, DeviceType device) {
  try {
    auto plan = MakeTrainingPlan(resolved);
    if (!plan.ok()) return -1;
    plan->device = device;
    return TotalBytes(PlanMemory(*plan));
  } catch (const EngineError&) {
    return -1;
  }
}

std::string TextOf(const Layout& layout, int ranks_before, const Lines& overrides, int64_t need, int gpus) {
  std::string text = layout.ranks == ranks_before ? "" : fmt::format("--ranks {}", layout.ranks);
  for (const std::string& line : overrides) text += (text.empty() ? "" : " ") + line;
  const std::string lacking =
      layout.too_many_ranks ? fmt::format("; needs {} GPUs, {} {} here", layout.ranks, gpus, gpus == 1 ? "is" : "are") : "";
  return fmt::format("{} ({} MiB a rank{})", text, need >> 20, lacking);
}

// All that is tried, in the order of its interest: those that can run first, then those with few changes.
std::vector<Layout> LayoutsToTry(size_t changes, int64_t tensor, int64_t ranks, int gpus) {
  std::vector<Layout> tried;
  const auto add = [&](unsigned bits, int64_t size, int64_t growth) {
    Layout layout{.changes = bits, .tensor_parallel = size, .growth = growth, .ranks = ranks * growth, .text = ""};
    if (size > tensor) layout.ranks = (ranks + size - 1) / size * size;
    layout.too_many_ranks = gpus > 0 && layout.ranks > gpus;
    tried.push_back(layout);
  };
  for (unsigned bits = 0; bits < 1u << changes; ++bits) {
    for (int64_t size = tensor; size <= std::max<int64_t>(8, tensor); size *= 2) add(bits, size, 1);
    for (const int64_t growth : {2, 4, 8}) add(bits, tensor, growth);
  }
  std::stable_sort(tried.begin(), tried.end(), [tensor](const Layout& a, const Layout& b) {
    const auto weight = [tensor](const Layout& l) {
      return std::popcount(l.changes) + (l.tensor_parallel > tensor || l.growth > 1 ? 1 : 0);
    };
    return std::tuple(a.too_many_ranks, weight(a), a.tensor_parallel * a.growth) <
           std::tuple(b.too_many_ranks, weight(b), b.tensor_parallel * b.growth);
  });
  return tried;
}

// Bytes of the experts' weights, gradients and optimizer state.
int64_t ExpertBytes(const TrainingPlan& plan, const v1::MemoryEstimate& memory) {
  const GptConfig& c = plan.model;
  const int64_t experts =
      CountLayers(c, IsMoeLayer) * c.num_moe_experts * 3 * c.hidden_size * c.moe_ffn_hidden_size / plan.parallel.tensor;
  const int64_t all = memory.gradient_bytes() / static_cast<int64_t>(sizeof(float));
  const int64_t bytes = memory.weight_bytes() + memory.gradient_bytes() + memory.optimizer_bytes();
  return static_cast<int64_t>(static_cast<double>(bytes) * static_cast<double>(experts) /
                              static_cast<double>(std::max<int64_t>(1, all)));
}

}  // namespace

v1::MemoryEstimate PlanMemory(const TrainingPlan& plan) {
  PlannedGroup tensor(plan.parallel.tensor);
  Context context;
  context.device = plan.device;
  GptModel model(plan.model, &tensor, context);
  ParameterStore store(plan.model.dtype, plan.device);
  model.DeclareParameters(&store);
  const GptModel::MemoryPlan parts = model.PlanMemory(store, static_cast<int>(plan.micro_batch_size));
  const bool cuda = plan.device == DeviceType::kCuda, sharded = plan.distributed_optimizer && plan.parallel.data > 1;
  const int64_t elements =
      store.PlannedElements() + (plan.distributed_optimizer ? Optimizer::SpareElements(plan.parallel.data) : 0);
  v1::MemoryEstimate memory;
  memory.set_parameters(store.NumGlobalElements());
  memory.set_weight_bytes(elements * static_cast<int64_t>(SizeOf(plan.model.dtype)) + parts.weight_copies);
  memory.set_gradient_bytes(elements * static_cast<int64_t>(sizeof(float)));
  memory.set_optimizer_bytes(Optimizer::PlannedStateBytes(store.PlannedElements(), plan.model.dtype, OptimizerOptionsOf(plan),
                                                          sharded ? plan.parallel.data : 1));
  memory.set_activation_bytes(parts.activations);
  memory.set_workspace_bytes(parts.scratch + (cuda ? static_cast<int64_t>(kOperatorWorkspaceBytes) : 0));
  const BucketOptions buckets = OptimizerOptionsOf(plan).buckets;
  const bool overlaps = plan.parallel.data > 1 && (buckets.overlap_reduce || (buckets.overlap_gather && sharded));
  if (cuda) memory.set_runtime_bytes(GpuRuntimeBytes(plan.parallel.tensor, plan.parallel.data, overlaps));
  return memory;
}

std::vector<std::string> LayoutsThatFit(const v1::ResolvedConfig& resolved, const LayoutResolver& resolve, DeviceType device,
                                        const MemoryPlace& place) {
  constexpr size_t kShown = 5;
  const v1::ConfigContainer& config = resolved.config();
  const std::vector<Lines> changes = ChangesFor(config, std::max(1, resolved.data_parallel_size()));
  const int64_t tensor = std::max<int64_t>(1, config.model().tensor_model_parallel_size());
  const int64_t ranks = std::max<int64_t>(1, resolved.ranks());
  std::vector<Layout> found;
  for (Layout& layout : LayoutsToTry(changes.size(), tensor, ranks, place.gpus)) {
    const bool more_than_needed = std::any_of(found.begin(), found.end(), [&](const Layout& smaller) {
      return (smaller.changes & layout.changes) == smaller.changes && smaller.tensor_parallel <= layout.tensor_parallel &&
             smaller.growth <= layout.growth;
    });
    if (more_than_needed || found.size() == kShown) continue;
    Lines overrides;
    if (layout.tensor_parallel > tensor) {
      overrides = {fmt::format("model.tensor_model_parallel_size={}", layout.tensor_parallel), "model.sequence_parallel=true"};
    }
    if (layout.growth > 1 && !config.ddp().use_distributed_optimizer()) overrides.emplace_back(kSharded);
    for (size_t i = 0; i < changes.size(); ++i) {
      if (layout.growth > 1 && changes[i].front() == kSharded) continue;
      if ((layout.changes >> i & 1) != 0) overrides.insert(overrides.end(), changes[i].begin(), changes[i].end());
    }
    const absl::StatusOr<v1::ResolvedConfig> changed = resolve(overrides, static_cast<int>(layout.ranks));
    if (!changed.ok()) continue;
    const int64_t need = NeedOf(*changed, device);
    if (need < 0 || need > place.bytes) continue;
    layout.text = TextOf(layout, resolved.ranks(), overrides, need, place.gpus);
    found.push_back(layout);
  }
  Lines lines;
  for (const Layout& layout : found) lines.push_back(layout.text);
  if (lines.empty()) {
    lines.emplace_back(
        "none of train.micro_batch_size=1, recomputation, BF16 moments, tensor parallelism up to 8 and an optimizer sharded over "
        "up to 8 times the data-parallel ranks is enough: use a smaller model or sequence");
  }
  if (config.model().num_moe_experts() > 0) {
    lines.emplace_back(
        "experts: data-parallel ranks hold all of them each; tensor-parallel ranks a part of each "
        "(with model.expert_tensor_parallel_size=1, Megatron-Bridge's choice in its recipes, tensor parallelism would not shrink "
        "them; neither it nor model.expert_model_parallel_size is in this version)");
  }
  return lines;
}

std::string WhyTooLarge(const v1::ResolvedConfig& resolved, const LayoutResolver& resolve, const TrainingPlan& plan,
                        const MemoryPlace& place) {
  const v1::MemoryEstimate memory = PlanMemory(plan);
  if (place.bytes <= 0 || TotalBytes(memory) <= place.bytes) return "";
  std::string text = fmt::format("a rank needs about {} MiB of memory, {} MiB are there ({})", TotalBytes(memory) >> 20,
                                 place.bytes >> 20, MemoryLine(memory));
  if (plan.model.num_moe_experts > 0) text += fmt::format("; its experts alone take {} MiB", ExpertBytes(plan, memory) >> 20);
  text += ". What fits:";
  for (const std::string& line : LayoutsThatFit(resolved, resolve, plan.device, place)) text += "\n  " + line;
  return text;
}

}  // namespace mbridge
