// For comparing CUDA twins with CPU twins: the same values on both sides, and what counts as equal.
#pragma once

#include <random>

#include "engine/ops/cuda/test_device.h"

namespace mbridge::test {

// The CPU side holds values of `dtype` in F32 storage, which every CPU twin knows.
struct Twin {
  Twin(DType dtype, const Shape& shape, const Values& values) : cpu(DType::kF32, shape, values), gpu(dtype, shape, values) {}
  // Random values of the dtype.
  Twin(DType dtype, const Shape& shape, uint32_t seed, double scale = 1.0)
      : Twin(dtype, shape, RandomValues(shape.NumElements(), seed, scale, dtype)) {}
  Owned cpu;
  OnGpu gpu;
};

inline Values RandomInts(int64_t count, uint32_t seed, int limit) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<int> uniform(0, limit - 1);
  Values values(count);
  for (double& x : values) x = uniform(engine);
  return values;
}

// Distance of neighbours of a dtype, relative, at most; for F32 the few steps that functions of the two sides differ by.
inline double StepOf(DType dtype) { return dtype == DType::kBF16 ? 1.0 / 128 : dtype == DType::kF16 ? 1.0 / 1024 : 4e-6; }

// Every element within a step of `dtype` (plus `absolute`); of 16-bit values at most `share` differ at all.
inline void ExpectWithinAStep(const Values& actual, const Values& expected, DType dtype, double absolute = 1e-7,
                              double share = 0.01) {
  ExpectNear(actual, expected, StepOf(dtype), absolute);
  if (dtype == DType::kF32) return;
  int64_t different = 0;
  for (size_t i = 0; i < expected.size(); ++i) different += actual[i] != expected[i];
  EXPECT_LE(different, 2 + share * expected.size()) << "of " << expected.size();
}

struct RowShape {
  int64_t rows, width;
};

}  // namespace mbridge::test
