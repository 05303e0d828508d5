#include "engine/train/memory_plan.h"

#include <algorithm>
#include <bit>
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

// A change of some keys that saves memory.
struct Change {
  std::vector<std::string> overrides;
  void (*apply)(v1::ConfigContainer* config);
};

void SetTensorParallel(int64_t size, v1::ConfigContainer* config) {
  config->mutable_model()->set_tensor_model_parallel_size(size);
  config->mutable_model()->set_sequence_parallel(size > 1);
}

// Those that the configuration has not made yet, cheapest in speed first.
std::vector<Change> ChangesFor(const v1::ConfigContainer& config, int data_parallel) {
  std::vector<Change> changes;
  if (data_parallel > 1 && !config.ddp().use_distributed_optimizer()) {
    changes.push_back({{"ddp.use_distributed_optimizer=true"},
                       [](v1::ConfigContainer* c) { c->mutable_ddp()->set_use_distributed_optimizer(true); }});
  }
  if (config.train().micro_batch_size() > 1) {
    changes.push_back(
        {{"train.micro_batch_size=1"}, [](v1::ConfigContainer* c) { c->mutable_train()->set_micro_batch_size(1); }});
  }
  if (config.model().bf16() && config.optimizer().exp_avg_dtype() != "bf16") {
    changes.push_back(
        {{"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16"},
         [](v1::ConfigContainer* c) {
           c->mutable_optimizer()->set_use_precision_aware_optimizer(true);
           c->mutable_optimizer()->set_exp_avg_dtype("bf16");
           c->mutable_optimizer()->set_exp_avg_sq_dtype("bf16");
         }});
  }
  if (config.model().recompute_granularity() != "full") {
    changes.push_back({{"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"},
                       [](v1::ConfigContainer* c) {
                         c->mutable_model()->set_recompute_granularity("full");
                         c->mutable_model()->set_recompute_method("uniform");
                         c->mutable_model()->set_recompute_num_layers(1);
                       }});
  }
  return changes;
}

struct Layout {
  unsigned changes = 0;  // Bits of those made.
  int64_t tensor_parallel = 1;
  std::string text;
};

// Need of the configuration with the changes; -1 where that is no legal layout.
int64_t NeedOf(v1::ResolvedConfig resolved, DeviceType device) {
  try {
    auto plan = MakeTrainingPlan(resolved);
    if (!plan.ok()) return -1;
    plan->device = device;
    return TotalBytes(PlanMemory(*plan));
  } catch (const EngineError&) {
    return -1;
  }
}

std::string TextOf(const v1::ResolvedConfig& changed, const v1::ResolvedConfig& before, const std::vector<std::string>& overrides,
                   int64_t need) {
  std::string text = changed.ranks() == before.ranks() ? "" : fmt::format("--ranks {}", changed.ranks());
  for (const std::string& line : overrides) text += (text.empty() ? "" : " ") + line;
  return fmt::format("{} ({} MiB a rank)", text, need >> 20);
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

std::vector<std::string> LayoutsThatFit(const v1::ResolvedConfig& resolved, DeviceType device, int64_t available) {
  constexpr size_t kShown = 5;
  const v1::ConfigContainer& config = resolved.config();
  const std::vector<Change> changes = ChangesFor(config, std::max(1, resolved.data_parallel_size()));
  const int64_t tensor = std::max<int64_t>(1, config.model().tensor_model_parallel_size());
  std::vector<Layout> tried;
  for (int64_t size = tensor; size <= std::max<int64_t>(8, tensor); size *= 2) {
    for (unsigned bits = 0; bits < 1u << changes.size(); ++bits) tried.push_back({bits, size, ""});
  }
  std::stable_sort(tried.begin(), tried.end(), [tensor](const Layout& a, const Layout& b) {
    const auto weight = [tensor](const Layout& l) { return std::popcount(l.changes) + (l.tensor_parallel > tensor ? 1 : 0); };
    return weight(a) < weight(b);
  });
  std::vector<Layout> found;
  for (Layout& layout : tried) {
    const bool more_than_needed = std::any_of(found.begin(), found.end(), [&](const Layout& smaller) {
      return (smaller.changes & layout.changes) == smaller.changes && smaller.tensor_parallel <= layout.tensor_parallel;
    });
    if (more_than_needed || found.size() == kShown) continue;
    v1::ResolvedConfig changed = resolved;
    std::vector<std::string> overrides;
    if (layout.tensor_parallel > tensor) {
      SetTensorParallel(layout.tensor_parallel, changed.mutable_config());
      overrides = {fmt::format("model.tensor_model_parallel_size={}", layout.tensor_parallel), "model.sequence_parallel=true"};
      const int64_t ranks = std::max<int64_t>(1, resolved.ranks()), unit = layout.tensor_parallel;
      changed.set_ranks(static_cast<int32_t>((ranks + unit - 1) / unit * unit));
      changed.set_data_parallel_size(static_cast<int32_t>(changed.ranks() / unit));
    }
    for (size_t i = 0; i < changes.size(); ++i) {
      if ((layout.changes >> i & 1) == 0) continue;
      changes[i].apply(changed.mutable_config());
      overrides.insert(overrides.end(), changes[i].overrides.begin(), changes[i].overrides.end());
    }
    const int64_t need = NeedOf(changed, device);
    if (need < 0 || need > available) continue;
    layout.text = TextOf(changed, resolved, overrides, need);
    found.push_back(layout);
  }
  std::vector<std::string> lines;
  for (const Layout& layout : found) lines.push_back(layout.text);
  if (lines.empty()) {
    lines.emplace_back(
        "none of train.micro_batch_size=1, recomputation, BF16 moments and tensor parallelism up to 8 is enough: use a smaller "
        "model or sequence");
  }
  if (config.model().num_moe_experts() > 0 && config.model().has_expert_tensor_parallel_size()) {
    lines.push_back(
        fmt::format("model.tensor_model_parallel_size does not make experts smaller: that is for "
                    "model.expert_tensor_parallel_size, which is {}",
                    config.model().expert_tensor_parallel_size()));
  }
  return lines;
}

std::string WhyTooLarge(const v1::ResolvedConfig& resolved, const TrainingPlan& plan, int64_t available) {
  const v1::MemoryEstimate memory = PlanMemory(plan);
  if (available <= 0 || TotalBytes(memory) <= available) return "";
  std::string text =
      fmt::format("a rank needs about {} MiB of memory, {} MiB are there ({}). What fits:", TotalBytes(memory) >> 20,
                  available >> 20, MemoryLine(memory));
  for (const std::string& line : LayoutsThatFit(resolved, plan.device, available)) text += "\n  " + line;
  return text;
}

}  // namespace mbridge
