#include "engine/ops/embedding.h"

#include "engine/ops/cuda/twin_test.h"

namespace mbridge::test {
namespace {

Values Repeated(Values ids, int64_t every, double id) {
  for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(every)) ids[i] = id;
  return ids;
}

TEST(EmbeddingCudaSmall, ForwardEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  constexpr int64_t kVocabulary = 50, kPlaces = 40, kBatch = 3, kSequence = 37;
  Values id_values = RandomInts(kBatch * kSequence, 1, kVocabulary);
  const Owned ids(DType::kI32, {kBatch, kSequence}, id_values);
  const Owned foreign(DType::kI32, {kBatch, kSequence}, Repeated(id_values, 3, -1.0));
  const OnGpu gpu_foreign(foreign);
  const Owned places(DType::kI32, {kBatch, kSequence}, RandomInts(kBatch * kSequence, 2, kPlaces));
  const OnGpu gpu_ids(ids), gpu_places(places);
  for (const DType dtype : kGpuTypes) {
    for (const int64_t h : {1, 7, 64, 2056}) {
      const Shape shape{kSequence, kBatch, h};
      const Twin words(dtype, {kVocabulary, h}, 3), positions(dtype, {kPlaces, h}, 4);
      const Owned keep(DType::kU8, shape, RandomInts(shape.NumElements(), 5, 2));
      const OnGpu gpu_keep(keep);
      for (const int variant : {0, 1, 2, 3}) {
        const bool has_places = variant & 1, has_keep = variant & 2;
        const Owned expected(DType::kF32, shape);
        const OnGpu actual(dtype, shape);
        EmbeddingForward.cpu({}, has_places ? ids : foreign, places, words.cpu, has_places ? positions.cpu.tensor() : Tensor(),
                             has_keep ? keep.tensor() : Tensor(), 0.1, dtype, expected);
        EmbeddingForward(gpu, has_places ? gpu_ids.tensor() : gpu_foreign.tensor(), gpu_places, words.gpu,
                         has_places ? positions.gpu.tensor() : Tensor(), has_keep ? gpu_keep.tensor() : Tensor(), 0.1, dtype,
                         actual);
        EXPECT_EQ(actual.ToValues(), expected.ToValues()) << NameOf(dtype) << " " << h << " " << variant;
      }
    }
  }
}

// Both sides' table gradients.
struct Gradients {
  Values actual, expected;
};

Gradients Backward(const Gpu& gpu, DType dtype, int64_t b, int64_t s, int64_t h, int64_t vocabulary, const Values& id_values,
                   EmbeddingSum sum) {
  const Owned ids(DType::kI32, {b, s}, id_values), touched(DType::kI32, {vocabulary}, Values(vocabulary, -1.0));
  const Owned gathered(DType::kF32, {b * s, h});
  const Twin dy(dtype, {s, b, h}, 3), grad(DType::kF32, {vocabulary, h}, 4);
  const OnGpu gpu_ids(ids), gpu_touched(touched), gpu_gathered(DType::kF32, {b * s, h});
  EmbeddingBackward.cpu({}, ids, dy.cpu, dtype, sum, grad.cpu, touched, gathered);
  EmbeddingBackward(gpu, gpu_ids, dy.gpu, dtype, sum, grad.gpu, gpu_touched, gpu_gathered);
  EXPECT_EQ(gpu_touched.ToValues(), touched.ToValues());
  return {grad.gpu.ToValues(), grad.cpu.ToValues()};
}

TEST(EmbeddingCudaSmall, BackwardOfFewIdsEqualsTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t h : {1, 7, 64, 2056}) {
      for (const EmbeddingSum sum : {EmbeddingSum::kMainGradient, EmbeddingSum::kTiedGradient}) {
        const Values many = RandomInts(4 * 33, 1, 20), one(1, 19.0), same(3 * 400, 7.0);
        Gradients g = Backward(gpu, dtype, 4, 33, h, 1000, many, sum);
        EXPECT_EQ(g.actual, g.expected) << NameOf(dtype) << " " << h;
        g = Backward(gpu, dtype, 1, 1, h, 20, one, sum);
        EXPECT_EQ(g.actual, g.expected) << NameOf(dtype) << " " << h;
        // Words of another rank's table, beside the id whose bits are all ones.
        g = Backward(gpu, dtype, 4, 33, h, 32, Repeated(Repeated(many, 2, 31.0), 3, -1.0), sum);
        EXPECT_EQ(g.actual, g.expected) << NameOf(dtype) << " " << h;
        g = Backward(gpu, dtype, 3, 400, h, 8, same, sum);
        EXPECT_EQ(g.actual, g.expected) << NameOf(dtype) << " " << h;
      }
    }
  }
}

TEST(EmbeddingCuda, BackwardOfManyIdsMatchesTheCpuTwin) {
  MB_NEEDS_GPU();
  const Gpu gpu;
  for (const DType dtype : kGpuTypes) {
    for (const int64_t h : {3, 64}) {
      for (const EmbeddingSum sum : {EmbeddingSum::kMainGradient, EmbeddingSum::kTiedGradient}) {
        for (const Values& ids :
             {RandomInts(2 * 1601, 1, 5000), Repeated(RandomInts(2 * 1601, 2, 300), 3, 11.0), Values(2 * 1601, 4999.0)}) {
          const Gradients g = Backward(gpu, dtype, 2, 1601, h, 5000, ids, sum);
          // An id that occurs 3202 times: F32 sums over magnitudes of about 1600, in another order.
          ExpectWithinAStep(g.actual, g.expected, dtype, StepOf(dtype) + 1e-4, 0.05);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mbridge::test
