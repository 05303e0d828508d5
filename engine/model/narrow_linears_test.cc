// The three products of a linear layer in each recipe against the exact ones.
#include "engine/model/narrow_linears.h"

#include <algorithm>

#include "engine/core/parameter.h"
#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Owned;
using test::RandomValues;
using test::Values;

constexpr int64_t kTokens = 64, kIn = 96, kOut = 160;

struct Products {
  Values y, dx, dw;
};

class NarrowLinearsTest : public testing::Test {
 protected:
  NarrowLinearsTest()
      : x_(DType::kF32, {kTokens, 1, kIn}, RandomValues(kTokens * kIn, 1)),
        dy_(DType::kF32, {kTokens, 1, kOut}, RandomValues(kTokens * kOut, 2, 1e-5)),
        store_(DType::kBF16, DeviceType::kCpu) {
    store_.Add({.name = "layer.weight", .shape = {kOut, kIn}, .global_shape = {kOut, kIn}});
    store_.Allocate();
    const Values w = RandomValues(kOut * kIn, 3, 0.1);
    for (int64_t i = 0; i < kOut * kIn; ++i) store_[0].value.as<BFloat16>()[i] = ToBFloat16(static_cast<float>(w[i]));
    weights_ = Weights(&store_, DType::kF32);
    exact_ = {Values(kTokens * kOut), Values(kTokens * kIn), Values(kOut * kIn)};
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t o = 0; o < kOut; ++o) {
        for (int64_t i = 0; i < kIn; ++i) {
          exact_.y[t * kOut + o] += x_[t * kIn + i] * w[o * kIn + i];
          exact_.dx[t * kIn + i] += dy_[t * kOut + o] * w[o * kIn + i];
          exact_.dw[o * kIn + i] += dy_[t * kOut + o] * x_[t * kIn + i];
        }
      }
    }
  }

  // With codes kept or the input read again.
  Products Run(NarrowLinears* linears, bool whole = true) {
    Arena arena(1 << 20);
    const NarrowInput kept = linears->AllocateInput(&arena, kTokens, kIn, whole);
    const Owned y(DType::kF32, {kTokens, 1, kOut}), dx(DType::kF32, {kTokens, 1, kIn}), dw(DType::kF32, {kOut, kIn});
    linears->Forward(0, x_, kept, true, y);
    linears->InputGradient(0, dy_, dx);
    linears->WeightGradient(0, dy_, kept.codes.empty() ? x_.tensor() : Tensor(), kept, dw);
    return {y.ToValues(), dx.ToValues(), dw.ToValues()};
  }

  NarrowLinears Make(const LowPrecisionOptions& options) {
    NarrowLinears linears(options, {}, DType::kF32);
    EXPECT_EQ(linears.Add("layer.weight", 0, kOut, kIn), 0);
    linears.Prepare(kTokens);
    linears.OnWeightsChanged(weights_);
    return linears;
  }

  // Root of the mean square of the difference, relative to the exact values.
  static double Error(const Values& a, const Values& exact) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      difference += (a[i] - exact[i]) * (a[i] - exact[i]);
      size += exact[i] * exact[i];
    }
    return std::sqrt(difference / size);
  }

  Owned x_, dy_;
  ParameterStore store_;
  Weights weights_;
  Products exact_;
};

// Uniform operands of sums with random signs: an operand's relative error is a product's. E4M3 rounds by up to 2^-4, in the mean
// square 2^-4 / sqrt(3) at most = 3.6 %; with two such operands 5.1 %, with one E5M2 operand (7.2 %) 8.1 %.
TEST_F(NarrowLinearsTest, ProductsHaveTheErrorOfTheirFormats) {
  constexpr double kE4M3 = 0.051, kE5M2 = 0.081;
  for (const ScalingRecipe recipe :
       {ScalingRecipe::kCurrent, ScalingRecipe::kDelayed, ScalingRecipe::kBlockwise, ScalingRecipe::kMxfp8}) {
    for (const bool wide : {false, true}) {
      NarrowLinears linears = Make({.recipe = recipe, .wide_gradients = wide});
      const Products products = Run(&linears);
      const double y = Error(products.y, exact_.y), dx = Error(products.dx, exact_.dx), dw = Error(products.dw, exact_.dw);
      EXPECT_LT(y, kE4M3) << static_cast<int>(recipe);
      EXPECT_LT(dx, wide ? kE5M2 : kE4M3) << static_cast<int>(recipe);
      EXPECT_LT(dw, wide ? kE5M2 : kE4M3) << static_cast<int>(recipe);
      EXPECT_GT(std::min({y, dx, dw}), 0.01);  // It did round.
    }
  }
}

// E2M1 rounds uniform values by up to 1/4, at random by up to 1/2; scales add up to 1/16.
TEST_F(NarrowLinearsTest, FourBitProductsHaveTheErrorOfTheirFormat) {
  NarrowLinears linears = Make({.recipe = ScalingRecipe::kNvfp4});
  const Products products = Run(&linears), again = Run(&linears);
  EXPECT_LT(Error(products.y, exact_.y), 0.20);
  EXPECT_LT(Error(products.dx, exact_.dx), 0.30);
  EXPECT_LT(Error(products.dw, exact_.dw), 0.30);
  EXPECT_GT(Error(products.y, exact_.y), 0.05);
  EXPECT_EQ(products.y, again.y);
  EXPECT_NE(products.dx, again.dx);  // Other draws.
}

TEST_F(NarrowLinearsTest, CodesServeAsWellAsTheInput) {
  for (const ScalingRecipe recipe : {ScalingRecipe::kCurrent, ScalingRecipe::kDelayed}) {
    NarrowLinears linears = Make({.recipe = recipe});
    for (int pass = 0; pass < 2; ++pass) {
      const Products codes = Run(&linears), input = Run(&linears, false);
      EXPECT_EQ(codes.dw, input.dw);
      EXPECT_EQ(codes.y, input.y);
      linears.UpdateScales(nullptr);
    }
  }
}

// Whole blocks of 128: products of codes. Sixteen tokens less: the same values, quantised and widened again.
TEST(NarrowBlocksTest, CodesAndEmulationAgree) {
  constexpr int64_t kSide = 128, kWide = 256, kMany = 256;
  ParameterStore store(DType::kBF16, DeviceType::kCpu);
  store.Add({.name = "w", .shape = {kWide, kSide}, .global_shape = {kWide, kSide}});
  store.Allocate();
  const Values w = RandomValues(kWide * kSide, 3);
  for (int64_t i = 0; i < kWide * kSide; ++i) store[0].value.as<BFloat16>()[i] = ToBFloat16(static_cast<float>(w[i]));
  const Weights weights(&store, DType::kF32);
  const auto with_quiet_end = [](int64_t width, uint32_t seed) {
    Values values = RandomValues(kMany * width, seed);
    std::fill(values.end() - 16 * width, values.end(), 0.0);
    return values;
  };
  const Owned x(DType::kF32, {kMany, kSide}, with_quiet_end(kSide, 1)), dy(DType::kF32, {kMany, kWide}, with_quiet_end(kWide, 2));
  std::vector<Products> outcomes;
  // The last 16 tokens are zeros.
  for (const int64_t tokens : {kMany, kMany - 16}) {
    NarrowLinears linears({.recipe = ScalingRecipe::kBlockwise}, {}, DType::kF32);
    linears.Add("w", 0, kWide, kSide);
    linears.Prepare(tokens);
    EXPECT_EQ(linears.takes_codes(), tokens == kMany);
    linears.OnWeightsChanged(weights);
    Arena arena(1 << 22);
    for (const bool whole : {true, false}) {
      const NarrowInput kept = linears.AllocateInput(&arena, tokens, kSide, whole);
      EXPECT_EQ(kept.codes.empty(), !whole || tokens != kMany);
      const Tensor in = x.tensor().Rows(0, tokens), gradient = dy.tensor().Rows(0, tokens);
      const Owned y(DType::kF32, {tokens, kWide}), dx(DType::kF32, {tokens, kSide}), dw(DType::kF32, {kWide, kSide});
      linears.Forward(0, in, kept, true, y);
      linears.InputGradient(0, gradient, dx);
      linears.WeightGradient(0, gradient, in, kept, dw);
      outcomes.push_back({y.ToValues(), dx.ToValues(), dw.ToValues()});
    }
  }
  for (size_t i = 1; i < outcomes.size(); ++i) {
    for (size_t j = 0; j < outcomes[i].y.size(); ++j) ASSERT_NEAR(outcomes[i].y[j], outcomes[0].y[j], 1e-4);
    for (size_t j = 0; j < outcomes[i].dx.size(); ++j) ASSERT_NEAR(outcomes[i].dx[j], outcomes[0].dx[j], 1e-4);
    for (size_t j = 0; j < outcomes[i].dw.size(); ++j) ASSERT_NEAR(outcomes[i].dw[j], outcomes[0].dw[j], 1e-3);
  }
}

TEST_F(NarrowLinearsTest, WeightGradientsCanStayWide) {
  NarrowLinears linears = Make({.recipe = ScalingRecipe::kCurrent, .weight_gradients = false});
  EXPECT_FALSE(linears.KeepsCodes(true));
  EXPECT_LT(Error(Run(&linears).dw, exact_.dw), 1e-5);
}

TEST_F(NarrowLinearsTest, DelayedScalesFollowTheHistory) {
  NarrowLinears linears = Make({.recipe = ScalingRecipe::kDelayed, .margin = 1, .history_length = 2});
  const auto state = [&](const std::string& name) {
    for (const auto& [known, tensor] : linears.StateTensors()) {
      if (known == name) return tensor.as<float>()[0];
    }
    ADD_FAILURE() << name;
    return 0.0f;
  };
  double largest = 0;
  for (const double value : x_.ToValues()) largest = std::max(largest, std::fabs(value));
  Run(&linears);
  linears.UpdateScales(nullptr);
  EXPECT_FLOAT_EQ(state("fp8.inputs.scale"), static_cast<float>(448 / largest / 2));
  const Products first = Run(&linears);
  EXPECT_LT(Error(first.y, exact_.y), 0.051);
  // Ten times larger values saturate now, and no longer in the next iteration.
  for (int64_t i = 0; i < kTokens * kIn; ++i) x_.Set(i, 10 * x_[i]);
  for (double& value : exact_.y) value *= 10;
  EXPECT_GT(Error(Run(&linears).y, exact_.y), 0.3);
  linears.UpdateScales(nullptr);
  EXPECT_FLOAT_EQ(state("fp8.inputs.scale"), static_cast<float>(448 / (10 * largest) / 2));
  EXPECT_LT(Error(Run(&linears).y, exact_.y), 0.051);
  // Evaluation leaves no trace.
  for (int64_t i = 0; i < kTokens * kIn; ++i) x_.Set(i, 100 * x_[i]);
  Arena arena(1 << 20);
  const Owned y(DType::kF32, {kTokens, 1, kOut});
  linears.Forward(0, x_, linears.AllocateInput(&arena, kTokens, kIn, true), false, y);
  linears.UpdateScales(nullptr);
  EXPECT_FLOAT_EQ(state("fp8.inputs.scale"), static_cast<float>(448 / (10 * largest) / 2));
}

TEST_F(NarrowLinearsTest, RefusesSidesAndTokensThatMakeNoBlocks) {
  NarrowLinears linears({.recipe = ScalingRecipe::kMxfp8}, {}, DType::kF32);
  try {
    linears.Add("decoder.layers.0.mlp.linear_fc1.weight", 0, 48, 64);
    FAIL();
  } catch (const EngineError& error) {
    EXPECT_EQ(error.reason(), v1::REASON_INVALID_CONFIG);
    EXPECT_NE(std::string(error.what()).find("linear_fc1.weight is [48, 64]"), std::string::npos);
  }
  linears.Add("w", 0, 64, 64);
  EXPECT_THROW(linears.Prepare(48), EngineError);
}

}  // namespace
}  // namespace mbridge
