#include "engine/ops/dropout_mask.h"

#include "engine/ops/cuda/philox.h"
#include "engine/ops/cuda/vectors.h"

namespace mbridge::cuda {
namespace {

// cuRAND's uniform in (0, 1].
__device__ __forceinline__ uint8_t Below(uint32_t x, float limit) {
  constexpr float kInverse32 = 2.3283064e-10f;
  return __fmaf_rn(__uint2float_rn(x), kInverse32, kInverse32 / 2) < limit ? 1 : 0;
}
__device__ __forceinline__ uint32_t BelowBytes(const uint4& words, float limit) {
  return Below(words.x, limit) | Below(words.y, limit) << 8 | Below(words.z, limit) << 16 | Below(words.w, limit) << 24;
}

// A CUDA thread of ATen's kernel: its number and the whole grid's size.
struct Draw {
  uint64_t seed, block;  // block: offset / 4.
  int64_t threads, count;
  float limit;
  const uint64_t* words;  // Or null: seed and offset to start from, for a block that counts from there.

  __device__ __forceinline__ Draw Resolved() const {
    Draw draw = *this;
    if (words != nullptr) {
      draw.seed = words[0];
      draw.block += words[1] / 4;
    }
    return draw;
  }
};

// kVector of 4 or 8 neighbouring elements belong to a thread, which takes kVector / 4 blocks for them each time round.
template <int kVector> __global__ void __launch_bounds__(256) VectorKernel(const Draw given, uint8_t* keep) {
  const Draw draw = given.Resolved();
  constexpr int kBlocks = kVector / 4;
  const int64_t vectors = draw.count / kVector;
  for (int64_t q = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; q < vectors; q += int64_t{gridDim.x} * blockDim.x) {
    const int64_t thread = q % draw.threads, loop = q / draw.threads;
    Pack<uint8_t, kVector> bytes;
    uint32_t words[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      words[i] = BelowBytes(PhiloxBlock(draw.seed, thread, draw.block + kBlocks * loop + i), draw.limit);
    }
    memcpy(bytes.units, words, sizeof(words));
    StorePack(keep + q * kVector, bytes);
  }
}

// Vectors of 2: a thread takes a block every second time and the block's last two words in between.
__global__ void __launch_bounds__(256) PairKernel(const Draw given, uint8_t* keep) {
  const Draw draw = given.Resolved();
  const int64_t vectors = draw.count / 2;
  for (int64_t q = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; q < vectors; q += int64_t{gridDim.x} * blockDim.x) {
    const int64_t thread = q % draw.threads, loop = q / draw.threads;
    const uint4 words = PhiloxBlock(draw.seed, thread, draw.block + loop / 2);
    keep[2 * q] = Below(loop % 2 == 0 ? words.x : words.z, draw.limit);
    keep[2 * q + 1] = Below(loop % 2 == 0 ? words.y : words.w, draw.limit);
  }
}

// Single elements: word i of a thread's block number l is for element (4 l + i) threads + thread.
__global__ void __launch_bounds__(256) ScalarKernel(const Draw given, uint8_t* keep) {
  const Draw draw = given.Resolved();
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < draw.count; e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t thread = e % draw.threads, row = e / draw.threads;
    const uint4 words = PhiloxBlock(draw.seed, thread, draw.block + row / 4);
    const int word = static_cast<int>(row % 4);
    keep[e] = Below(word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w, draw.limit);
  }
}

void CheckProbability(double p) {
  if (!(p > 0.0 && p < 1.0)) ThrowEngineError("dropout probability {} is not inside (0, 1)", p);
}

void EagerCuda(const Context& context, const MaskPosition position, int sm_count, double p, int element_bytes,
               const Tensor& keep) {
  CheckProbability(p);
  const int64_t count = keep.size();
  if (count == 0) return;
  const Draw draw{position.stream.seed,        position.stream.offset / 4, CudaDrawThreads(count, sm_count), count,
                  static_cast<float>(1.0 - p), position.device_words};
  uint8_t* out = PointerOf<uint8_t>(keep);
  const cudaStream_t stream = StreamOf(context);
  const int64_t vector = DropoutVectorSize(count, element_bytes);
  if (vector >= 4 && !IsAligned(out, vector)) ThrowEngineError("a keep mask is not aligned to {} bytes", vector);
  switch (vector) {
    case 8: VectorKernel<8><<<GridOf(count, 256 * 8), 256, 0, stream>>>(draw, out); break;
    case 4: VectorKernel<4><<<GridOf(count, 256 * 4), 256, 0, stream>>>(draw, out); break;
    case 2: PairKernel<<<GridOf(count, 256 * 2), 256, 0, stream>>>(draw, out); break;
    default: ScalarKernel<<<GridOf(count, 256), 256, 0, stream>>>(draw, out);
  }
  MB_CUDA_LAUNCHED();
}

// Triton's: the first word of the block at counter (index, 0, 0, 0), folded to a positive number.
__device__ __forceinline__ uint8_t Kept(uint64_t seed, uint32_t index, float drop) {
  auto x = static_cast<int32_t>(Philox4x32(make_uint4(index, 0, 0, 0), seed).x);
  if (x < 0) x = -x - 1;
  return __fmul_rn(__int2float_rn(x), 4.6566127342e-10f) > drop ? 1 : 0;
}

// A seed, or where a compiled function draws one: ahead / 4 blocks after the position in `words`.
struct CompiledSeed {
  uint64_t seed;
  const uint64_t* words;
  uint64_t ahead;

  // DrawCompiledSeed.
  __device__ __forceinline__ uint64_t Resolved() const {
    if (words == nullptr) return seed;
    const uint4 drawn = PhiloxBlock(words[0], 0, (words[1] + ahead) / 4);
    const uint64_t value = uint64_t{drawn.x} << 32 | drawn.y;
    return value % ~0ull - (1ull << 63);
  }
};

template <int kVector>
__global__ void __launch_bounds__(256)
    CompiledKernel(const CompiledSeed given, float drop, int64_t first, int64_t count, uint8_t* keep) {
  const uint64_t seed = given.Resolved();
  const int64_t vectors = count / kVector;
  for (int64_t q = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; q < vectors; q += int64_t{gridDim.x} * blockDim.x) {
    uint8_t bytes[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) bytes[i] = Kept(seed, static_cast<uint32_t>(first + q * kVector + i), drop);
    Pack<uint8_t, kVector> pack;
    memcpy(pack.units, bytes, sizeof(bytes));
    StorePack(keep + first + q * kVector, pack);
  }
}

void LaunchCompiled(const Context& context, const CompiledSeed& key, double p, const Tensor& keep) {
  CheckProbability(p);
  const int64_t count = keep.size();
  uint8_t* out = PointerOf<uint8_t>(keep);
  const auto drop = static_cast<float>(p);
  const int64_t whole = IsAligned(out, 4) ? count / 4 * 4 : 0;
  if (whole > 0) CompiledKernel<4><<<GridOf(whole, 256 * 4), 256, 0, StreamOf(context)>>>(key, drop, 0, whole, out);
  if (whole < count)
    CompiledKernel<1><<<GridOf(count - whole, 256), 256, 0, StreamOf(context)>>>(key, drop, whole, count - whole, out);
  MB_CUDA_LAUNCHED();
}

void CompiledCuda(const Context& context, int64_t seed, double p, const Tensor& keep) {
  LaunchCompiled(context, {static_cast<uint64_t>(seed), nullptr, 0}, p, keep);
}

void CompiledAtCuda(const Context& context, const MaskPosition position, double p, const Tensor& keep) {
  PhiloxStream stream = position.stream;
  const uint64_t seed = position.device_words == nullptr ? static_cast<uint64_t>(DrawCompiledSeed(&stream)) : 0;
  LaunchCompiled(context, {seed, position.device_words, position.stream.offset}, p, keep);
}

const bool g_registered = (DrawEagerDropoutMask.cuda = &EagerCuda, DrawCompiledDropoutMask.cuda = &CompiledCuda,
                           DrawCompiledDropoutMaskAt.cuda = &CompiledAtCuda, true);

}  // namespace
}  // namespace mbridge::cuda
