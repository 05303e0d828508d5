#include "engine/core/torch_random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "engine/core/cuda_sincos.h"
#include "engine/core/error.h"
#include "engine/core/philox.h"

namespace mbridge {
namespace {

constexpr int64_t kBlockThreads = 256, kThreadsPerSm = 2048, kUnroll = 4;
constexpr float kInverse32 = 2.3283064e-10f;  // 2^-32 as cuRAND writes it.

// cuRAND's uniform in (0, 1].
float CurandUniform(uint32_t x) { return std::fma(static_cast<float>(x), kInverse32, kInverse32 / 2); }

// Smallest x in [0, end] with predicate(x); the predicate is monotone, false first. `end` if it never holds.
uint64_t FirstTrue(uint64_t end, const std::function<bool(uint32_t)>& predicate) {
  uint64_t low = 0, high = end;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (predicate(static_cast<uint32_t>(middle)))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Box-Muller as cuRAND does it; cosine second.
void CurandBoxMuller(uint32_t x, uint32_t y, float* first, float* second) {
  constexpr float kAngle = kInverse32 * 6.2831855f;
  const float u = CurandUniform(x);
  const float v = std::fma(static_cast<float>(y), kAngle, kAngle / 2);
  const float radius = std::sqrt(-2.0f * static_cast<float>(std::log(static_cast<double>(u))));
  float sine, cosine;
  CudaFastSinCos(v, &sine, &cosine);
  *first = sine * radius;
  *second = cosine * radius;
}

// VEC of 4 or 8: vector q belongs to thread q mod T in its loop iteration q / T and takes VEC / 4 blocks there.
void VectorDropoutMask(const PhiloxStream& stream, int64_t threads, uint64_t limit, int64_t vec, std::span<uint8_t> keep) {
  const int64_t vectors = static_cast<int64_t>(keep.size()) / vec, parts = vec / 4;
  const int64_t groups_per_loop = threads / 8, loops = (vectors + threads - 1) / threads;
  const int64_t groups = loops * groups_per_loop;
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t loop = group / groups_per_loop, thread = group % groups_per_loop * 8, q = loop * threads + thread;
    if (q >= vectors) continue;
    uint32_t words[2][8];
    for (int64_t part = 0; part < parts; ++part) {
      PhiloxBelowBySubsequence(stream.seed, stream.offset / 4 + parts * loop + part, static_cast<uint32_t>(thread), limit,
                               words[part]);
    }
    const int64_t lanes = std::min<int64_t>(8, vectors - q);
    uint8_t* out = keep.data() + q * vec;
    if (parts == 1) {
      std::memcpy(out, words[0], lanes * 4);
    } else {
      uint32_t joined[16];
      for (int lane = 0; lane < 8; ++lane) {
        joined[2 * lane] = words[0][lane];
        joined[2 * lane + 1] = words[1][lane];
      }
      std::memcpy(out, joined, lanes * 8);
    }
  }
}

// VEC of 1: component i of a thread's block in loop l goes to element (4 l + i) T + t.
void ScalarDropoutMask(const PhiloxStream& stream, int64_t threads, uint64_t limit, std::span<uint8_t> keep) {
  const int64_t count = static_cast<int64_t>(keep.size());
#pragma omp parallel for schedule(static)
  for (int64_t e = 0; e < count; ++e) {
    const int64_t thread = e % threads, row = e / threads;
    keep[e] = PhiloxAt(stream.seed, thread, stream.offset + 4 * (row / kUnroll))[row % kUnroll] < limit;
  }
}

// VEC of 2: a thread takes a new block every second vector and the block's last two words in between.
void PairDropoutMask(const PhiloxStream& stream, int64_t threads, uint64_t limit, std::span<uint8_t> keep) {
  const int64_t vectors = static_cast<int64_t>(keep.size()) / 2;
#pragma omp parallel for schedule(static)
  for (int64_t q = 0; q < vectors; ++q) {
    const int64_t thread = q % threads, loop = q / threads;
    const PhiloxWords words = PhiloxAt(stream.seed, thread, stream.offset + 4 * (loop / 2));
    for (int i = 0; i < 2; ++i) keep[2 * q + i] = words[2 * (loop % 2) + i] < limit;
  }
}

void CheckProbability(double p) {
  if (!(p > 0.0 && p < 1.0)) ThrowEngineError("dropout probability {} is not inside (0, 1)", p);
}

// Natural logarithm, sine and cosine by the single-precision polynomials of Moshier's Cephes library.
float CephesLog(float x) {
  int exponent;
  float m = std::frexp(x, &exponent);
  float e = static_cast<float>(exponent);
  if (m < 0.707106781186547524f) {
    e -= 1.0f;
    m = m + m - 1.0f;
  } else {
    m -= 1.0f;
  }
  const float z = m * m;
  constexpr float kCoefficients[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                                     -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  float y = 0.0f;
  for (float coefficient : kCoefficients) y = y * m + coefficient;
  y = y * m * z;
  y += e * -2.12194440e-4f;
  y -= 0.5f * z;
  return m + y + e * 0.693359375f;
}

// For x >= 0.
void CephesSinCos(float x, float* sine, float* cosine) {
  const int octant = (static_cast<int>(x * 1.27323954473516f) + 1) & ~1;
  const float y = static_cast<float>(octant);
  float r = x + y * -0.78515625f;
  r += y * -2.4187564849853515625e-4f;
  r += y * -3.77489497744594108e-8f;
  const float z = r * r;
  float c = 2.443315711809948e-5f;
  c = c * z + -1.388731625493765e-3f;
  c = c * z + 4.166664568298827e-2f;
  c = c * z * z - 0.5f * z + 1.0f;
  float s = -1.9515295891e-4f;
  s = s * z + 8.3321608736e-3f;
  s = s * z + -1.6666654611e-1f;
  s = s * z * r + r;
  const bool swap = (octant & 2) != 0;
  *sine = (swap ? c : s) * ((octant & 4) != 0 ? -1.0f : 1.0f);
  *cosine = (swap ? s : c) * (((octant - 2) & 4) != 0 ? 1.0f : -1.0f);
}

// Sixteen uniforms in, sixteen normals out.
void CpuNormalBlock(float mean, float std, float* data) {
  for (int k = 0; k < 8; ++k) {
    const float u1 = 1.0f - data[k];
    const float radius = std::sqrt(-2.0f * CephesLog(u1));
    float sine, cosine;
    CephesSinCos(6.283185307179586f * data[k + 8], &sine, &cosine);
    data[k] = radius * cosine * std + mean;
    data[k + 8] = radius * sine * std + mean;
  }
}

}  // namespace

int64_t CudaDrawThreads(int64_t count, int sm_count) {
  const int64_t blocks = std::min((count + kBlockThreads - 1) / kBlockThreads, sm_count * (kThreadsPerSm / kBlockThreads));
  return kBlockThreads * blocks;
}

int64_t DropoutVectorSize(int64_t count, int element_bytes) {
  int64_t size = 16 / element_bytes;
  while (size > 1 && count % size != 0) size /= 2;
  return size;
}

uint64_t CudaDrawAdvance(int64_t count, int sm_count) {
  if (count <= 0) return 0;
  return static_cast<uint64_t>((count - 1) / (CudaDrawThreads(count, sm_count) * kUnroll) + 1) * kUnroll;
}

void CudaNormal(PhiloxStream* stream, int sm_count, float mean, float std, std::span<float> out) {
  const int64_t count = static_cast<int64_t>(out.size());
  if (count == 0) return;
  const int64_t threads = CudaDrawThreads(count, sm_count), loops = (count - 1) / (threads * kUnroll) + 1;
#pragma omp parallel for schedule(static)
  for (int64_t thread = 0; thread < threads; ++thread) {
    for (int64_t loop = 0; loop < loops; ++loop) {
      const PhiloxWords words = PhiloxAt(stream->seed, thread, stream->offset + 4 * loop);
      float normal[4];
      for (int pair = 0; pair < 2; ++pair) {
        if ((kUnroll * loop + 2 * pair) * threads + thread >= count) break;
        CurandBoxMuller(words[2 * pair], words[2 * pair + 1], &normal[2 * pair], &normal[2 * pair + 1]);
      }
      for (int i = 0; i < 4; ++i) {
        const int64_t element = (kUnroll * loop + i) * threads + thread;
        if (element < count) out[element] = normal[i] * std + mean;
      }
    }
  }
  stream->offset += CudaDrawAdvance(count, sm_count);
}

void EagerDropoutMask(PhiloxStream* stream, int sm_count, double p, int element_bytes, std::span<uint8_t> keep) {
  CheckProbability(p);
  const int64_t count = static_cast<int64_t>(keep.size());
  if (count == 0) return;
  const float keep_probability = static_cast<float>(1.0 - p);
  const uint64_t limit = FirstTrue(1ull << 32, [&](uint32_t x) { return !(CurandUniform(x) < keep_probability); });
  const int64_t threads = CudaDrawThreads(count, sm_count), vec = DropoutVectorSize(count, element_bytes);
  if (vec >= 4) {
    VectorDropoutMask(*stream, threads, limit, vec, keep);
  } else if (vec == 2) {
    PairDropoutMask(*stream, threads, limit, keep);
  } else {
    ScalarDropoutMask(*stream, threads, limit, keep);
  }
  stream->offset += CudaDrawAdvance(count, sm_count);
}

int64_t DrawCompiledSeed(PhiloxStream* stream) {
  const PhiloxWords words = PhiloxAt(stream->seed, 0, stream->offset);
  stream->offset += kUnroll;
  const uint64_t value = (static_cast<uint64_t>(words[0]) << 32) | words[1];
  return static_cast<int64_t>(value % ~0ull - (1ull << 63));  // randint(-2^63, 2^63 - 1) on one element.
}

void CompiledDropoutMask(int64_t seed, double p, std::span<uint8_t> keep) {
  CheckProbability(p);
  const float drop = static_cast<float>(p);
  const uint64_t limit = FirstTrue(1ull << 31, [&](uint32_t x) { return static_cast<float>(x) * 4.6566127342e-10f > drop; });
  const int64_t count = static_cast<int64_t>(keep.size()), groups = (count + 7) / 8;
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < groups; ++group) {
    uint8_t bytes[8];
    PhiloxFoldedAtLeastByCounter(static_cast<uint64_t>(seed), static_cast<uint32_t>(group * 8), static_cast<uint32_t>(limit),
                                 bytes);
    std::memcpy(keep.data() + group * 8, bytes, std::min<int64_t>(8, count - group * 8));
  }
}

TorchCpuGenerator::TorchCpuGenerator(uint64_t seed, uint64_t drawn)
    : seed_(seed), drawn_(drawn), engine_(static_cast<uint32_t>(seed)) {
  engine_.discard(drawn);
}

uint32_t TorchCpuGenerator::Next() {
  ++drawn_;
  return engine_();
}

void TorchCpuGenerator::Skip(uint64_t count) {
  drawn_ += count;
  engine_.discard(count);
}

void TorchCpuGenerator::SkipNormal(int64_t count) { Skip(static_cast<uint64_t>(count + (count % 16 != 0 ? 16 : 0))); }

void TorchCpuGenerator::Normal(float mean, float std, std::span<float> out) {
  const size_t count = out.size();
  if (count < 16) ThrowEngineError("the CPU normal of {} elements: at least 16", count);
  const auto uniform = [this] { return static_cast<float>(Next() & 0xFFFFFFu) * 0x1p-24f; };
  for (float& value : out) value = uniform();
  for (size_t begin = 0; begin + 16 <= count; begin += 16) CpuNormalBlock(mean, std, out.data() + begin);
  if (count % 16 != 0) {
    float* tail = out.data() + count - 16;
    for (int k = 0; k < 16; ++k) tail[k] = uniform();
    CpuNormalBlock(mean, std, tail);
  }
}

RngStreams::RngStreams(uint64_t seed, int pipeline_rank, int tensor_rank, int sm_count)
    : default_stream{seed + 100 * static_cast<uint64_t>(pipeline_rank)},
      model_parallel{default_stream.seed + 2718 + static_cast<uint64_t>(tensor_rank)},
      expert_parallel{default_stream.seed + 1024 + static_cast<uint64_t>(tensor_rank)},
      cpu(default_stream.seed),
      sm_count(sm_count) {}

void RngStreams::SkipJitWarmup(int64_t ffn_hidden_size, int64_t seq_length, int64_t micro_batch_size, int64_t hidden_size,
                               int64_t bda_seq_length) {
  const auto skip = [this](int64_t count) { default_stream.offset += CudaDrawAdvance(count, sm_count); };
  skip(ffn_hidden_size);                                  // Bias of the fused GELU.
  skip(seq_length * micro_batch_size * ffn_hidden_size);  // Its input.
  skip(bda_seq_length * micro_batch_size * hidden_size);  // Input and
  skip(bda_seq_length * micro_batch_size * hidden_size);  // residual of bias-dropout-add,
  skip(hidden_size);                                      // its bias,
  default_stream.offset += 10 * kUnroll;                  // and its ten calls, one seed each.
}

RngStreams::State RngStreams::Save() const {
  return {default_stream.seed, default_stream.offset,          model_parallel.seed, model_parallel.offset, cpu.seed(),
          cpu.drawn(),         static_cast<uint64_t>(sm_count)};
}

RngStreams RngStreams::Restore(const State& state) {
  RngStreams streams(0);
  streams.default_stream = {state[0], state[1]};
  streams.model_parallel = {state[2], state[3]};
  streams.cpu = TorchCpuGenerator(state[4], state[5]);
  streams.sm_count = static_cast<int>(state[6]);
  return streams;
}

}  // namespace mbridge
