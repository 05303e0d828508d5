#include "engine/ops/cuda/twin_test.h"
#include "engine/ops/expert_activation.h"
#include "engine/ops/moe_permute.h"

namespace mbridge::test {
namespace {

struct Choice {
  int64_t tokens, experts, k;
};
constexpr Choice kSmall[] = {{1, 2, 1}, {5, 3, 2}, {40, 8, 3}, {300, 40, 4}};
constexpr Choice kLarge[] = {{4099, 64, 6}, {1000, 512, 8}};

// Rows on both sides, from a random choice of different experts a token.
struct SortedRows {
  explicit SortedRows(const Choice& c)
      : shape(c),
        offsets(DType::kI32, {c.experts + 1}),
        slots(DType::kI32, {c.tokens * c.k}),
        places(DType::kI32, {c.tokens * c.k}),
        gpu_offsets(DType::kI32, {c.experts + 1}),
        gpu_slots(DType::kI32, {c.tokens * c.k}),
        gpu_places(DType::kI32, {c.tokens * c.k}) {
    std::mt19937 engine(static_cast<uint32_t>(c.tokens));
    std::vector<int> all(c.experts);
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t e = 0; e < c.experts; ++e) all[e] = static_cast<int>(e);
      std::shuffle(all.begin(), all.end(), engine);
      chosen.insert(chosen.end(), all.begin(), all.begin() + c.k);
    }
  }
  void Sort(const Gpu& gpu) {
    const Owned experts(DType::kI32, {shape.tokens, shape.k}, chosen);
    const OnGpu gpu_experts(DType::kI32, {shape.tokens, shape.k}, chosen);
    SortByExpert.cpu({}, experts, rows());
    SortByExpert(gpu, gpu_experts, gpu_rows());
    gpu.Synchronize();
  }
  ExpertRows rows() const { return {offsets, slots, places}; }
  ExpertRows gpu_rows() const { return {gpu_offsets, gpu_slots, gpu_places}; }
  int64_t count() const { return shape.tokens * shape.k; }

  Choice shape;
  Values chosen;
  Owned offsets, slots, places;
  OnGpu gpu_offsets, gpu_slots, gpu_places;
};

void ExpectSameOrder(const Gpu& gpu, const Choice& choice) {
  SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts", choice.tokens, choice.k, choice.experts));
  SortedRows sorted(choice);
  sorted.Sort(gpu);
  EXPECT_EQ(sorted.gpu_offsets.ToValues(), sorted.offsets.ToValues());
  EXPECT_EQ(sorted.gpu_slots.ToValues(), sorted.slots.ToValues());
  EXPECT_EQ(sorted.gpu_places.ToValues(), sorted.places.ToValues());
  const Twin load(DType::kF32, {choice.experts}, 1);
  AddExpertLoad.cpu({}, sorted.rows(), load.cpu);
  AddExpertLoad(gpu, sorted.gpu_rows(), load.gpu);
  EXPECT_EQ(load.gpu.ToValues(), load.cpu.ToValues());
}

TEST(ExpertRowsCuda, SmallChoicesSortAsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Choice& choice : kSmall) ExpectSameOrder(gpu, choice);
}

TEST(ExpertRowsCuda, SortAsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Choice& choice : kLarge) ExpectSameOrder(gpu, choice);
  ExpectSameOrder(gpu, {70000, 4, 2});  // More blocks than the scan takes in one go.
}

TEST(ExpertRowsCuda, SmallGatherAndSumEqualTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Choice& choice : kSmall) {
    SortedRows sorted(choice);
    sorted.Sort(gpu);
    for (const DType dtype : kGpuTypes) {
      for (const int64_t width : {3, 64, 264}) {
        const Twin x(dtype, {choice.tokens, width}, 1), rows(dtype, {sorted.count(), width}, 2),
            added(dtype, {choice.tokens, width}, 3);
        const Owned gathered(DType::kF32, {sorted.count(), width}), y(DType::kF32, {choice.tokens, width});
        const OnGpu gpu_gathered(dtype, {sorted.count(), width}), gpu_y(dtype, {choice.tokens, width});
        GatherRows.cpu({}, x.cpu, sorted.rows(), gathered);
        GatherRows(gpu, x.gpu, sorted.gpu_rows(), gpu_gathered);
        EXPECT_EQ(gpu_gathered.ToValues(), gathered.ToValues());
        for (const bool add : {false, true}) {
          SumRows.cpu({}, rows.cpu, sorted.rows(), add ? added.cpu.tensor() : Tensor(), dtype, y);
          SumRows(gpu, rows.gpu, sorted.gpu_rows(), add ? added.gpu.tensor() : Tensor(), dtype, gpu_y);
          EXPECT_EQ(gpu_y.ToValues(), y.ToValues()) << NameOf(dtype) << " " << width << " " << add;
        }
      }
    }
  }
}

void ExpectSameActivation(const Gpu& gpu, const SortedRows& sorted, DType dtype, int64_t n, ExpertActivationOptions o) {
  SCOPED_TRACE(
      fmt::format("{} {} rows of {}, gate {}, fused {}", NameOf(dtype), sorted.count(), n, static_cast<int>(o.gate), o.fused));
  o.precision = dtype;
  const int64_t count = sorted.count();
  const Shape slots{sorted.shape.tokens, sorted.shape.k};
  const Twin x(dtype, {count, 2 * n}, 1, 4.0), dy(dtype, {count, n}, 2),
      p(DType::kF32, slots, RandomValues(count, 3, 1.0, DType::kF32));
  const Owned y(DType::kF32, {count, n}), dx(DType::kF32, {count, 2 * n}), d_p(DType::kF32, slots);
  const OnGpu gpu_y(dtype, {count, n}), gpu_dx(dtype, {count, 2 * n}), gpu_d_p(DType::kF32, slots);
  // Eager roundings make a step of the gate a step or two of the product.
  const double absolute = o.fused || dtype == DType::kF32 ? 4e-6 : StepOf(dtype), share = o.fused ? 0.03 : 0.1;
  ExpertActivationForward.cpu({}, x.cpu, sorted.rows(), p.cpu, o, y);
  ExpertActivationForward(gpu, x.gpu, sorted.gpu_rows(), p.gpu, o, gpu_y);
  ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, absolute, share);
  ExpertActivationBackward.cpu({}, dy.cpu, x.cpu, sorted.rows(), p.cpu, o, dx, d_p);
  ExpertActivationBackward(gpu, dy.gpu, x.gpu, sorted.gpu_rows(), p.gpu, o, gpu_dx, gpu_d_p);
  ExpectWithinAStep(gpu_dx.ToValues(), dx.ToValues(), dtype, absolute, share);
  // A sum of n products of up to 16: they cancel.
  const double of_sum = (o.fused ? 4e-6 : StepOf(dtype)) * std::sqrt(static_cast<double>(n)) * 16;
  ExpectNear(gpu_d_p.ToValues(), d_p.ToValues(), StepOf(o.router_precision), of_sum);
}

TEST(ExpertActivationCuda, SmallShapesNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Choice& choice : kSmall) {
    SortedRows sorted(choice);
    sorted.Sort(gpu);
    for (const DType dtype : kGpuTypes) {
      ExpectSameActivation(gpu, sorted, dtype, 7, {});
      ExpectSameActivation(gpu, sorted, dtype, 96, {.fused = false, .router_precision = dtype});
      ExpectSameActivation(gpu, sorted, dtype, 1032, {});
      ExpectSameActivation(gpu, sorted, dtype, 40, {.gate = GateKind::kQuickGelu, .clamp = 2.5f, .linear_offset = 1.0f});
    }
  }
}

TEST(ExpertActivationCuda, SmallBiasesNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const Choice& choice : kSmall) {
    SortedRows sorted(choice);
    sorted.Sort(gpu);
    const int64_t count = sorted.count(), experts = choice.experts;
    const Shape slots{choice.tokens, choice.k};
    for (const DType dtype : kGpuTypes) {
      for (const int64_t n : {5, 64}) {
        const auto cut = [&](const Tensor& all) {
          std::vector<Tensor> parts;
          for (int64_t e = 0; e < experts; ++e) parts.push_back(all.Rows(e, 1).View({n}));
          return parts;
        };
        const Twin biases(dtype, {experts, n}, 1), p(DType::kF32, slots, RandomValues(count, 3, 1.0, DType::kF32)),
            dy(dtype, {count, n}, 4);
        for (const bool weighted : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} rows of {}, weighted {}", NameOf(dtype), count, n, weighted));
          const Twin x(dtype, {count, n}, 2), grads(DType::kF32, {experts, n}, 5), d_p(DType::kF32, slots, 6);
          const Tensor cpu_p = weighted ? p.cpu.tensor() : Tensor(), gpu_p = weighted ? p.gpu.tensor() : Tensor();
          ExpertBiasAdd.cpu({}, x.cpu, cut(biases.cpu), sorted.rows(), cpu_p, dtype);
          ExpertBiasAdd(gpu, x.gpu, cut(biases.gpu), sorted.gpu_rows(), gpu_p, dtype);
          ExpectWithinAStep(x.gpu.ToValues(), x.cpu.ToValues(), dtype, 1e-7, 0);
          ExpertBiasBackward.cpu({}, dy.cpu, cut(biases.cpu), sorted.rows(), cpu_p, dtype, cut(grads.cpu),
                                 weighted ? d_p.cpu.tensor() : Tensor());
          ExpertBiasBackward(gpu, dy.gpu, cut(biases.gpu), sorted.gpu_rows(), gpu_p, dtype, cut(grads.gpu),
                             weighted ? d_p.gpu.tensor() : Tensor());
          ExpectNear(grads.gpu.ToValues(), grads.cpu.ToValues(), StepOf(dtype), dtype == DType::kF32 ? 1e-5 : StepOf(dtype));
          ExpectNear(d_p.gpu.ToValues(), d_p.cpu.ToValues(), 4e-6, 4e-6);
        }
      }
    }
  }
}

TEST(ExpertActivationCuda, SmallSharedGateNearTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [tokens, n] : {RowShape{1, 3}, RowShape{9, 200}}) {
      const Twin x(dtype, {tokens, n}, 1), dy(dtype, {tokens, n}, 2), logits(DType::kF32, {tokens, 1}, 3, 2.0);
      const Owned y(DType::kF32, {tokens, n}), dx(DType::kF32, {tokens, n}), d_logits(DType::kF32, {tokens, 1});
      const OnGpu gpu_y(dtype, {tokens, n}), gpu_d_logits(DType::kF32, {tokens, 1});
      SharedGateForward.cpu({}, x.cpu, logits.cpu, dtype, y);
      SharedGateForward(gpu, x.gpu, logits.gpu, dtype, gpu_y);
      ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype);
      SharedGateBackward.cpu({}, dy.cpu, x.cpu, logits.cpu, dtype, dx, d_logits);
      SharedGateBackward(gpu, dy.gpu, x.gpu, logits.gpu, dtype, dy.gpu, gpu_d_logits);  // In place.
      ExpectWithinAStep(dy.gpu.ToValues(), dx.ToValues(), dtype);
      ExpectNear(gpu_d_logits.ToValues(), d_logits.ToValues(), 2 * StepOf(dtype), 1e-5);
    }
  }
}

}  // namespace
}  // namespace mbridge::test
