#include "engine/ops/softmax_cross_entropy.h"

#include "engine/ops/test_support.h"

namespace mbridge {
namespace {

using test::Kind;
using test::Owned;
using test::Values;

constexpr int64_t kRows = 5, kVocabulary = 53;

double Loss(const Values& z, int64_t row, int64_t label) {
  double sum = 0;
  for (int64_t j = 0; j < kVocabulary; ++j) sum += std::exp(z[row * kVocabulary + j]);
  return std::log(sum) - z[row * kVocabulary + label];
}

TEST(SoftmaxCrossEntropy, MatchesADoubleReference) {
  const Values labels{0, 52, 7, 7, 30}, weights{0.5, 1, 0, -2, 0.01};
  const Owned label(DType::kI32, {kRows}, labels), weight(DType::kF32, {kRows}, weights), loss(DType::kF32, {kRows});
  for (const Kind& kind : test::kKinds) {
    const Values logits = test::RandomValues(kRows * kVocabulary, 1, 5.0, kind.precision);
    const Owned z(kind.storage, {kRows, kVocabulary}, logits);
    SoftmaxCrossEntropy({}, z, label, weight, kind.precision, loss);
    Values losses, gradients;
    for (int64_t i = 0; i < kRows; ++i) {
      const auto own = static_cast<int64_t>(labels[i]);
      losses.push_back(Loss(logits, i, own));
      for (int64_t j = 0; j < kVocabulary; ++j) {
        gradients.push_back((std::exp(-Loss(logits, i, j)) - (j == own ? 1.0 : 0.0)) * weights[i]);
      }
    }
    test::ExpectNear(loss.ToValues(), losses, 1e-6, 1e-6);
    test::ExpectNear(z.ToValues(), gradients, 1.1 * kind.epsilon() + 2e-6, 1e-7);
  }
}

TEST(SoftmaxCrossEntropy, LeavesTheLogitsWithoutWeights) {
  const Values logits = test::RandomValues(kRows * kVocabulary, 1, 5.0);
  const Owned z(DType::kBF16, {kRows, kVocabulary}, logits), label(DType::kI32, {kRows}, Values(kRows, 3.0));
  const Owned loss(DType::kF32, {kRows});
  SoftmaxCrossEntropy({}, z, label, {}, DType::kBF16, loss);
  EXPECT_EQ(z.ToValues(), logits);
  EXPECT_NEAR(loss[0], Loss(logits, 0, 3), 1e-5);
}

}  // namespace
}  // namespace mbridge
