#include "engine/ops/bias_add.h"
#include "engine/ops/bias_gelu.h"
#include "engine/ops/cuda/twin_test.h"
#include "engine/ops/dropout.h"
#include "engine/ops/geglu.h"
#include "engine/ops/logit_transform.h"
#include "engine/ops/rotary.h"
#include "engine/ops/scale.h"
#include "engine/ops/squared_relu.h"
#include "engine/ops/swiglu.h"

namespace mbridge::test {
namespace {

// Odd, narrower than a vector, wider than a block, and rows that end inside a block's turn.
constexpr RowShape kShapes[] = {{1, 1}, {3, 7}, {5, 96}, {9, 2048}, {7, 2312}, {2, 28672}, {1031, 40}};

TEST(BiasAddCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : kShapes) {
      for (const DType storage : {dtype, DType::kF32}) {
        const Twin x(storage, {rows, n}, 1), bias(storage, {n}, 2);
        BiasAdd.cpu({}, x.cpu, bias.cpu, dtype);
        BiasAdd(gpu, x.gpu, bias.gpu, dtype);
        EXPECT_EQ(x.gpu.ToValues(), x.cpu.ToValues()) << NameOf(storage) << " as " << NameOf(dtype) << " " << rows << " " << n;
      }
    }
  }
}

TEST(BiasAddCudaSmall, TakesUnalignedRows) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const Twin x(DType::kBF16, {33, 8}, 1), bias(DType::kBF16, {8}, 2);
  const auto shifted = [](Tensor t, int64_t by) {
    t.data = static_cast<char*>(t.data) + by * static_cast<int64_t>(SizeOf(t.dtype));
    t.shape = {32, 8};
    return t;
  };
  BiasAdd.cpu({}, shifted(x.cpu, 3), bias.cpu, DType::kBF16);
  BiasAdd(gpu, shifted(x.gpu, 3), bias.gpu, DType::kBF16);
  EXPECT_EQ(x.gpu.ToValues(), x.cpu.ToValues());
}

TEST(BiasGeluCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  // 1 + erf(u) cancels for negative u: its last bit is a good part of a step of F16 there.
  constexpr double kShare = 0.1;
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : kShapes) {
      for (const GeluKind kind : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
        const Twin x(dtype, {rows, n}, 1, 2.0), bias(dtype, {n}, 2), dy(dtype, {rows, n}, 3);
        for (const bool has_bias : {true, false}) {
          const Tensor cpu_bias = has_bias ? bias.cpu.tensor() : Tensor(), gpu_bias = has_bias ? bias.gpu.tensor() : Tensor();
          const Owned expected(DType::kF32, {rows, n});
          const OnGpu actual(dtype, {rows, n});
          BiasGeluForward.cpu({}, x.cpu, cpu_bias, kind, dtype, expected);
          BiasGeluForward(gpu, x.gpu, gpu_bias, kind, dtype, actual);
          ExpectWithinAStep(actual.ToValues(), expected.ToValues(), dtype, 1e-6, kShare);
          BiasGeluBackward.cpu({}, dy.cpu, x.cpu, cpu_bias, kind, dtype, expected);
          BiasGeluBackward(gpu, dy.gpu, x.gpu, gpu_bias, kind, dtype, actual);
          ExpectWithinAStep(actual.ToValues(), expected.ToValues(), dtype, 1e-6, kShare);
        }
      }
    }
  }
}

TEST(BiasGeluCudaSmall, BackwardInPlace) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  const Twin x(DType::kBF16, {5, 96}, 1, 2.0), dy(DType::kBF16, {5, 96}, 3);
  const OnGpu expected(DType::kBF16, {5, 96});
  BiasGeluBackward(gpu, dy.gpu, x.gpu, {}, GeluKind::kErf, DType::kBF16, expected);
  BiasGeluBackward(gpu, dy.gpu, x.gpu, {}, GeluKind::kErf, DType::kBF16, dy.gpu);
  EXPECT_EQ(dy.gpu.ToValues(), expected.ToValues());
}

TEST(SwiGluCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : kShapes) {
      for (const SwiGluKind kind : {SwiGluKind::kFused, SwiGluKind::kEager}) {
        const Twin x(dtype, {rows, 2 * n}, 1, 4.0), bias(dtype, {2 * n}, 2), dy(dtype, {rows, n}, 3);
        for (const bool has_bias : {true, false}) {
          const Tensor cpu_bias = has_bias ? bias.cpu.tensor() : Tensor(), gpu_bias = has_bias ? bias.gpu.tensor() : Tensor();
          const Owned y(DType::kF32, {rows, n}), dx(DType::kF32, {rows, 2 * n});
          const OnGpu gpu_y(dtype, {rows, n}), gpu_dx(dtype, {rows, 2 * n});
          SwiGluForward.cpu({}, x.cpu, cpu_bias, kind, dtype, y);
          SwiGluForward(gpu, x.gpu, gpu_bias, kind, dtype, gpu_y);
          ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, 1e-6, 0.03);
          SwiGluBackward.cpu({}, dy.cpu, x.cpu, cpu_bias, kind, dtype, dx);
          SwiGluBackward(gpu, dy.gpu, x.gpu, gpu_bias, kind, dtype, gpu_dx);
          ExpectWithinAStep(gpu_dx.ToValues(), dx.ToValues(), dtype, 2e-6, 0.03);
          const auto largest = [](const OnGpu& x) {
            double most = 0.001;
            for (const double value : x.ToValues()) most = std::max(most, std::fabs(value));
            return static_cast<double>(static_cast<float>(most));
          };
          const OnGpu amax(Owned(DType::kF32, {1}, {0.001})), dx_amax(Owned(DType::kF32, {1}, {0.001}));
          const OnGpu again_y(dtype, {rows, n}), again_dx(dtype, {rows, 2 * n});
          SwiGluForwardWithAmax(gpu, x.gpu, gpu_bias, kind, dtype, again_y, amax);
          SwiGluBackwardWithAmax(gpu, dy.gpu, x.gpu, gpu_bias, kind, dtype, again_dx, dx_amax);
          EXPECT_EQ(again_y.ToValues(), gpu_y.ToValues());
          EXPECT_EQ(again_dx.ToValues(), gpu_dx.ToValues());
          EXPECT_EQ(amax.ToValues()[0], largest(gpu_y));
          EXPECT_EQ(dx_amax.ToValues()[0], largest(gpu_dx));
        }
      }
    }
  }
}

TEST(GegluCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : {RowShape{3, 7}, RowShape{9, 96}}) {
      for (const GeluKind kind : {GeluKind::kTanhFused, GeluKind::kTanh, GeluKind::kErf, GeluKind::kErfFused}) {
        const Twin x(dtype, {rows, 2 * n}, 1, 2.0), bias(dtype, {2 * n}, 2), dy(dtype, {rows, n}, 3);
        const Owned y(DType::kF32, {rows, n}), dx(DType::kF32, {rows, 2 * n});
        const OnGpu gpu_y(dtype, {rows, n}), gpu_dx(dtype, {rows, 2 * n});
        GegluForward.cpu({}, x.cpu, bias.cpu, kind, dtype, y);
        GegluForward(gpu, x.gpu, bias.gpu, kind, dtype, gpu_y);
        // Eager rounding makes a step of the gate a step or two of the product.
        ExpectWithinAStep(gpu_y.ToValues(), y.ToValues(), dtype, StepOf(dtype), 0.1);
        GegluBackward.cpu({}, dy.cpu, x.cpu, bias.cpu, kind, dtype, dx);
        GegluBackward(gpu, dy.gpu, x.gpu, bias.gpu, kind, dtype, gpu_dx);
        ExpectWithinAStep(gpu_dx.ToValues(), dx.ToValues(), dtype, StepOf(dtype), 0.1);
      }
    }
  }
}

TEST(SquaredReluCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : {RowShape{3, 7}, RowShape{9, 96}}) {
      const Twin x(dtype, {rows, n}, 1, 2.0), bias(dtype, {n}, 2), dy(dtype, {rows, n}, 3);
      const Owned expected(DType::kF32, {rows, n});
      const OnGpu actual(dtype, {rows, n});
      SquaredReluForward.cpu({}, x.cpu, bias.cpu, dtype, expected);
      SquaredReluForward(gpu, x.gpu, bias.gpu, dtype, actual);
      EXPECT_EQ(actual.ToValues(), expected.ToValues());
      SquaredReluBackward.cpu({}, dy.cpu, x.cpu, bias.cpu, dtype, expected);
      SquaredReluBackward(gpu, dy.gpu, x.gpu, bias.gpu, dtype, actual);
      EXPECT_EQ(actual.ToValues(), expected.ToValues());
    }
  }
}

TEST(ScaleCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t count : {1, 2051, 30000}) {
      const Twin x(dtype, {count}, 1);
      Scale.cpu({}, x.cpu, 0.37f, dtype, x.cpu);
      Scale(gpu, x.gpu, 0.37f, dtype, x.gpu);
      EXPECT_EQ(x.gpu.ToValues(), x.cpu.ToValues());
    }
  }
}

TEST(LogitTransformCudaSmall, MatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kRows = 5, kColumns = 70, kStride = 77;
  const auto matrix = [](const Tensor& t) { return Matrix{t.data, t.dtype, kRows, kColumns, kStride}; };
  for (const DType dtype : kGpuTypes) {
    for (const LogitTransform& transform : {LogitTransform{0.5f, 0.0f}, LogitTransform{1.5f, 30.0f}}) {
      const Twin logits(dtype, {kRows, kStride}, 1, 40.0), gradient(dtype, {kRows, kStride}, 2);
      TransformLogits.cpu({}, matrix(logits.cpu), transform, dtype);
      TransformLogits(gpu, matrix(logits.gpu), transform, dtype);
      ExpectWithinAStep(logits.gpu.ToValues(), logits.cpu.ToValues(), dtype, 1e-5);
      const OnGpu same(dtype, {kRows, kStride}, logits.cpu.ToValues());
      TransformLogitsBackward.cpu({}, matrix(logits.cpu), transform, dtype, matrix(gradient.cpu));
      TransformLogitsBackward(gpu, matrix(same), transform, dtype, matrix(gradient.gpu));
      ExpectWithinAStep(gradient.gpu.ToValues(), gradient.cpu.ToValues(), dtype, 1e-6);
    }
  }
}

// 0 and 1, one in ten zero.
struct Mask {
  explicit Mask(const Shape& shape) : cpu(DType::kU8, shape, Draw(shape.NumElements())), gpu(cpu) {}
  static Values Draw(int64_t count) {
    Values values = RandomInts(count, 7, 10);
    for (double& x : values) x = x != 0;
    return values;
  }
  Owned cpu;
  OnGpu gpu;
};

TEST(DropoutCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t count : {1, 255, 2047, 2048, 2055, 300007}) {
      const Twin x(dtype, {count}, 1);
      const Mask keep({count});
      const OnGpu y(dtype, {count});
      Dropout.cpu({}, x.cpu, keep.cpu, 0.1, dtype, x.cpu);
      Dropout(gpu, x.gpu, keep.gpu, 0.1, dtype, y);
      EXPECT_EQ(y.ToValues(), x.cpu.ToValues()) << NameOf(dtype) << " " << count;
    }
  }
}

TEST(BiasDropoutAddCudaSmall, ForwardEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : kShapes) {
      const Mask keep({rows, n});
      for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const DropoutKind kind = variant & 1 ? DropoutKind::kEager : DropoutKind::kCompiled;
        const bool has_bias = variant & 2, has_keep = variant & 4;
        const Twin x(dtype, {rows, n}, 1), bias(dtype, {n}, 2), residual(dtype, {rows, n}, 3);
        BiasDropoutAddForward.cpu({}, x.cpu, has_bias ? bias.cpu.tensor() : Tensor(), residual.cpu,
                                  has_keep ? keep.cpu.tensor() : Tensor(), 0.1, kind, dtype, residual.cpu);
        BiasDropoutAddForward(gpu, x.gpu, has_bias ? bias.gpu.tensor() : Tensor(), residual.gpu,
                              has_keep ? keep.gpu.tensor() : Tensor(), 0.1, kind, dtype, residual.gpu);
        EXPECT_EQ(residual.gpu.ToValues(), residual.cpu.ToValues()) << NameOf(dtype) << " " << rows << " " << n << " " << variant;
      }
    }
  }
}

TEST(BiasDropoutAddCudaSmall, BackwardMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const auto& [rows, n] : kShapes) {
      const Mask keep({rows, n});
      for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const DropoutKind kind = variant & 1 ? DropoutKind::kEager : DropoutKind::kCompiled;
        const bool has_bias = variant & 2, has_keep = variant & 4;
        const Twin dy(dtype, {rows, n}, 1), grad(DType::kF32, {n}, 2);
        const Owned dx(DType::kF32, {rows, n});
        const OnGpu gpu_dx(dtype, {rows, n});
        BiasDropoutAddBackward.cpu({}, dy.cpu, has_keep ? keep.cpu.tensor() : Tensor(), 0.1, kind, dtype, dx,
                                   has_bias ? grad.cpu.tensor() : Tensor());
        BiasDropoutAddBackward(gpu, dy.gpu, has_keep ? keep.gpu.tensor() : Tensor(), 0.1, kind, dtype, gpu_dx,
                               has_bias ? grad.gpu.tensor() : Tensor());
        EXPECT_EQ(gpu_dx.ToValues(), dx.ToValues()) << NameOf(dtype) << " " << rows << " " << n << " " << variant;
        if (has_bias) ExpectWithinAStep(grad.gpu.ToValues(), grad.cpu.ToValues(), dtype, StepOf(dtype) + 1e-6 * rows, 1.0);
      }
    }
  }
}

TEST(RotaryCudaSmall, EqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  struct Case {
    int64_t s, b, heads, groups, size, half;
  };
  for (const DType dtype : kGpuTypes) {
    for (const auto& [s, b, heads, groups, size, half] :
         {Case{1, 1, 1, 1, 2, 1}, Case{5, 2, 4, 2, 6, 3}, Case{7, 3, 32, 8, 64, 32}, Case{3, 1, 8, 2, 128, 64},
          Case{3, 2, 6, 6, 96, 24}, Case{2, 1, 40, 10, 256, 128}, Case{2, 1, 150, 75, 18, 9}}) {
      const QkvLayout layout{heads, groups, size};
      const Twin qkv(dtype, {s, b, layout.width()}, 1);
      const Twin cosine(DType::kF32, {s, half}, RandomValues(s * half, 2, 1.0, dtype));
      const Twin sine(DType::kF32, {s, half}, RandomValues(s * half, 3, 1.0, dtype));
      for (const auto direction : {RotaryDirection::kForward, RotaryDirection::kBackward}) {
        for (const auto pairs : {RotaryPairs::kHalves, RotaryPairs::kInterleaved}) {
          Rotary.cpu({}, qkv.cpu, cosine.cpu, sine.cpu, layout, pairs, direction, dtype);
          Rotary(gpu, qkv.gpu, cosine.gpu, sine.gpu, layout, pairs, direction, dtype);
          EXPECT_EQ(qkv.gpu.ToValues(), qkv.cpu.ToValues()) << NameOf(dtype) << " heads of " << size;
        }
      }
    }
  }
}

}  // namespace
}  // namespace mbridge::test
