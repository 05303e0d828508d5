// PyTorch's random numbers, bit for bit, without PyTorch: what Megatron-LM draws on a CUDA device (ATen's
// native/cuda/DistributionTemplates.h and Dropout.cu, Inductor's dropout) and on the CPU (native/cpu/DistributionTemplates.h).
//
// A CUDA generator is a pair (seed, offset). A draw over n elements uses 256 * min(ceil(n / 256), 8 * SMs) threads, each with
// its own Philox subsequence; so the SM count of the device that is reproduced is part of the result (132: H100-SXM, H200).
// Thread use: one stream belongs to one thread; the fills use OpenMP and give the same bits for every thread count.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <span>

namespace mbridge {

inline constexpr int kHopperSmCount = 132;

struct PhiloxStream {
  uint64_t seed = 0;
  uint64_t offset = 0;  // A multiple of 4.
};

// Threads that draw `count` elements.
int64_t CudaDrawThreads(int64_t count, int sm_count);
// Neighbouring elements that a thread of the eager dropout kernel takes at once (ATen's get_vector_size).
int64_t DropoutVectorSize(int64_t count, int element_bytes);

// How far `offset` moves when `count` elements are drawn.
uint64_t CudaDrawAdvance(int64_t count, int sm_count);

// tensor.normal_(mean, std) in fp32 on a CUDA device; advances the stream. Sine and cosine are the device's (cuda_sincos.h), the
// logarithm is the double one rounded: rounded to BF16, about 2 in a million elements differ from the device's by one step.
void CudaNormal(PhiloxStream* stream, int sm_count, float mean, float std, std::span<float> out);

// Keep mask (1 kept, 0 dropped) of torch.nn.Dropout(p) on a CUDA tensor with elements of `element_bytes` (2 or 4); advances
// the stream. 0 < p < 1.
void EagerDropoutMask(PhiloxStream* stream, int sm_count, double p, int element_bytes, std::span<uint8_t> keep);

// The seed that a compiled (Inductor) function with dropout draws per call; advances the stream by 4.
int64_t DrawCompiledSeed(PhiloxStream* stream);

// Keep mask of dropout(p) inside a compiled function that drew `seed`, for linear element indices 0 .. size - 1. 0 < p < 1.
void CompiledDropoutMask(int64_t seed, double p, std::span<uint8_t> keep);

// torch's CPU generator (MT19937). Saved as (seed, drawn), restored by drawing again.
class TorchCpuGenerator {
 public:
  explicit TorchCpuGenerator(uint64_t seed, uint64_t drawn = 0);
  uint64_t seed() const { return seed_; }
  uint64_t drawn() const { return drawn_; }  // 32-bit numbers taken so far.

  uint32_t Next();
  void Skip(uint64_t count);
  // Contiguous fp32 tensor.normal_(mean, std) on the CPU (the AVX2 kernel's polynomials); at least 16 elements.
  void Normal(float mean, float std, std::span<float> out);
  // Takes as many numbers as Normal would for `count` elements.
  void SkipNormal(int64_t count);

 private:
  uint64_t seed_;
  uint64_t drawn_;
  std::mt19937 engine_;
};

// The generators of one Megatron-LM rank (megatron/core/tensor_parallel/random.py).
struct RngStreams {
  PhiloxStream default_stream;   // Embedding and hidden dropout (without sequence parallelism).
  PhiloxStream model_parallel;   // Weights of tensor-parallel layers, attention dropout; differs per tensor-parallel rank.
  PhiloxStream expert_parallel;  // Weights of experts. Draws nothing later, so checkpoints don't hold it.
  TorchCpuGenerator cpu;         // Position table, routers.
  int sm_count;

  // Right after Megatron-LM's seeding: base = seed + 100 * pipeline_rank; model parallel: base + 2718 + tensor_rank; experts,
  // which are split over the tensor-parallel ranks: base + 1024 + tensor_rank.
  explicit RngStreams(uint64_t seed, int pipeline_rank = 0, int tensor_rank = 0, int sm_count = kHopperSmCount);

  // Draws of Megatron-LM's _warmup_jit_function, always made before the model is built, on the default stream. Sizes are per
  // rank: ffn / tp; `bda_seq_length` is seq_length, with sequence parallelism seq_length / tp.
  void SkipJitWarmup(int64_t ffn_hidden_size, int64_t seq_length, int64_t micro_batch_size, int64_t hidden_size,
                     int64_t bda_seq_length);

  // For checkpoints. Restoring a state of another length is impossible by type.
  using State = std::array<uint64_t, 7>;
  State Save() const;
  static RngStreams Restore(const State& state);
};

}  // namespace mbridge
