#include "engine/ops/cuda/cublas_gemm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/ops/cuda/cublas_check.h"
#include "engine/ops/cuda/gemm_choices.h"
#include "engine/ops/cuda/gemm_tuning.h"

namespace mbridge::cuda {
namespace {

cublasLtHandle_t Handle() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t created = nullptr;
    MB_CUBLAS(cublasLtCreate(&created));
    return created;
  }();
  return handle;
}

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CUDA_R_32F;
    case DType::kBF16: return CUDA_R_16BF;
    case DType::kF16: return CUDA_R_16F;
    default: ThrowEngineError("no matrix product of {}", NameOf(dtype));
  }
}

// A row-major matrix is its transpose in cuBLASLt's column-major order, with the same distance between lines.
cublasLtMatrixLayout_t LayoutOf(const Matrix& x, int count, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MB_CUBLAS(cublasLtMatrixLayoutCreate(&layout, CudaType(x.dtype), x.cols, x.rows, x.stride));
  if (count > 1) {
    const int32_t batch = count;
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return layout;
}

// Descriptors of one problem and the algorithm chosen for it. Lives as long as the process. c^T = op(b)^T op(a)^T: cuBLASLt's
// first operand is our b.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

struct Operands {
  const void *first, *second;
  void* result;
  float alpha, beta;
};

cublasStatus_t Launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& x, const Context& context) {
  return cublasLtMatmul(Handle(), plan.operation, &x.alpha, x.first, plan.first, x.second, plan.second, &x.beta, x.result,
                        plan.result, x.result, plan.result, &algorithm, context.workspace,
                        std::min(context.workspace_bytes, kGemmWorkspaceBytes), static_cast<cudaStream_t>(context.stream));
}

// Largest power of two up to 256 that divides the address.
uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256u : static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1)));
}

// beta is no part of it: adding to c takes the algorithm of the plain product.
GemmKey KeyOf(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options,
              const GemmBatch& batch) {
  const int64_t types = static_cast<int64_t>(a.dtype) | static_cast<int64_t>(c.dtype) << 8 | int64_t{options.transpose_a} << 16 |
                        int64_t{options.transpose_b} << 17;
  const int64_t alignments = AlignmentOf(a.data) | int64_t{AlignmentOf(b.data)} << 16 | int64_t{AlignmentOf(c.data)} << 32;
  const auto workspace = static_cast<int64_t>(std::min(context.workspace_bytes, kGemmWorkspaceBytes));
  return {c.rows,        c.cols,         options.transpose_a ? a.rows : a.cols,
          a.stride,      b.stride,       c.stride,
          types,         alignments,     workspace,
          batch.count,   batch.stride_a, batch.stride_b,
          batch.stride_c};
}

Plan MakePlan(const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options, const GemmBatch& batch) {
  Plan plan;
  MB_CUBLAS(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t first = options.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = options.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  MB_CUBLAS(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
  MB_CUBLAS(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
  plan.first = LayoutOf(b, batch.count, batch.stride_b);
  plan.second = LayoutOf(a, batch.count, batch.stride_a);
  plan.result = LayoutOf(c, batch.count, batch.stride_c);
  return plan;
}

void Destroy(const Plan& plan) {
  cublasLtMatrixLayoutDestroy(plan.first);
  cublasLtMatrixLayoutDestroy(plan.second);
  cublasLtMatrixLayoutDestroy(plan.result);
  cublasLtMatmulDescDestroy(plan.operation);
}

std::vector<cublasLtMatmulAlgo_t> Candidates(const Context& context, const Plan& plan, const Operands& x, int wanted) {
  cublasLtMatmulPreference_t preference = nullptr;
  MB_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, decltype(&cublasLtMatmulPreferenceDestroy)> owner(
      preference, &cublasLtMatmulPreferenceDestroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    MB_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(std::min(context.workspace_bytes, kGemmWorkspaceBytes)));
  // The other schemes round partial sums to the result's type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, AlignmentOf(x.first));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, AlignmentOf(x.second));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, AlignmentOf(x.result));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, AlignmentOf(x.result));
  std::vector<cublasLtMatmulHeuristicResult_t> found(std::clamp(wanted, 1, 64));
  int count = 0;
  MB_CUBLAS(cublasLtMatmulAlgoGetHeuristic(Handle(), plan.operation, plan.first, plan.second, plan.result, plan.result,
                                           preference, static_cast<int>(found.size()), found.data(), &count));
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
  }
  return algorithms;
}

class Timer {
 public:
  explicit Timer(const Context& context) : context_(context), stream_(static_cast<cudaStream_t>(context.stream)) {
    MB_CUDA(cudaEventCreate(&begin_));
    MB_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  // Milliseconds of one product, of `repeats` in a row; infinity for an algorithm that refuses.
  float Time(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& x, int repeats) {
    MB_CUDA(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < repeats; ++i) {
      if (Launch(plan, algorithm, x, context_) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    }
    MB_CUDA(cudaEventRecord(end_, stream_));
    MB_CUDA(cudaEventSynchronize(end_));
    float milliseconds = 0;
    MB_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds / static_cast<float>(repeats);
  }

 private:
  const Context& context_;
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// A round over all candidates, then rounds over the best few. An earlier candidate stays unless a later one is 2 % faster, so
// that noise seldom decides.
cublasLtMatmulAlgo_t Fastest(const Context& context, const Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                             const Operands& x, double operations) {
  constexpr int kFinalists = 4, kRounds = 3;
  constexpr double kOperationsPerMs = 5e11, kWindowMs = 0.5;
  const int repeats = std::clamp(static_cast<int>(kWindowMs * kOperationsPerMs / (operations + 1.0)), 1, 10);
  Timer timer(context);
  std::vector<std::pair<float, int>> times;
  for (int i = 0; i < static_cast<int>(algorithms.size()); ++i) {
    timer.Time(plan, algorithms[i], x, 1);  // Loads the kernel.
    times.emplace_back(timer.Time(plan, algorithms[i], x, repeats), i);
  }
  std::sort(times.begin(), times.end());
  times.resize(std::min<size_t>(times.size(), kFinalists));
  std::sort(times.begin(), times.end(), [](const auto& left, const auto& right) { return left.second < right.second; });
  for (int round = 0; round < kRounds; ++round) {
    for (auto& [time, index] : times) time = std::min(time, timer.Time(plan, algorithms[index], x, repeats));
  }
  auto best = times.front();
  for (const auto& time : times) {
    if (time.first < 0.98f * best.first) best = time;
  }
  return algorithms[best.second];
}

// All plans of the process and the rules to choose by.
class Plans {
 public:
  static Plans& Get() {
    static auto* plans = new Plans;
    return *plans;
  }

  void SetTuning(const GemmTuning& tuning) {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, plan] : plans_) Destroy(plan);
    plans_.clear();
    tuning_ = tuning;
    choices_ = GemmChoices(tuning.cache_file);
  }

  void Save() {
    const std::lock_guard lock(mutex_);
    choices_.Save();
  }

  void Multiply(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options,
                const GemmBatch& batch) {
    const Operands x{b.data, a.data, c.data, options.alpha, options.accumulate ? 1.0f : 0.0f};
    const GemmKey key = KeyOf(context, a, b, c, options, batch);
    const std::lock_guard lock(mutex_);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan = MakePlan(a, b, c, options, batch);
      plan.algorithm = Choose(context, key, plan, x, c, batch);
      found = plans_.emplace(key, plan).first;
    }
    if (const cublasStatus_t status = Launch(found->second, found->second.algorithm, x, context);
        status != CUBLAS_STATUS_SUCCESS) {
      ThrowEngineError("cuBLASLt product {}: {}", Describe(a, b, c, options), cublasLtGetStatusString(status));
    }
  }

 private:
  static std::string Describe(const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options) {
    return fmt::format("{}[{}, {}]{} x [{}, {}]{} into {}[{}, {}]", NameOf(a.dtype), a.rows, a.cols,
                       options.transpose_a ? "^T" : "", b.rows, b.cols, options.transpose_b ? "^T" : "", NameOf(c.dtype), c.rows,
                       c.cols);
  }

  cublasLtMatmulAlgo_t Choose(const Context& context, const GemmKey& key, const Plan& plan, const Operands& x, const Matrix& c,
                              const GemmBatch& batch) {
    if (const cublasLtMatmulAlgo_t* known = choices_.Find(key); known != nullptr && IsUsable(plan, *known, context))
      return *known;
    const std::vector<cublasLtMatmulAlgo_t> candidates =
        Candidates(context, plan, x, tuning_.time_candidates ? tuning_.candidates : 1);
    if (candidates.empty()) {
      ThrowEngineError("cuBLASLt has no algorithm for a product into {}[{}, {}], inner size {}, row strides {}, {}, {}",
                       NameOf(c.dtype), c.rows, c.cols, key[2], key[3], key[4], key[5]);
    }
    const auto stream = static_cast<cudaStream_t>(context.stream);
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    MB_CUDA(cudaStreamIsCapturing(stream, &capturing));
    if (candidates.size() == 1 || capturing != cudaStreamCaptureStatusNone) return candidates.front();
    Operands timed = x;
    timed.beta = 0.0f;
    void* scratch = nullptr;
    if (x.beta != 0.0f) {  // The sums in c must survive: results of the trials go elsewhere.
      const int64_t elements = (c.rows - 1) * c.stride + c.cols + (batch.count - 1) * batch.stride_c;
      if (cudaMalloc(&scratch, elements * SizeOf(c.dtype) + 256) != cudaSuccess) {
        cudaGetLastError();
        return candidates.front();
      }
      timed.result = static_cast<char*>(scratch) + reinterpret_cast<uintptr_t>(x.result) % 256;
    }
    const double operations =
        2.0 * static_cast<double>(key[0]) * static_cast<double>(key[1]) * static_cast<double>(key[2]) * batch.count;
    const cublasLtMatmulAlgo_t fastest = Fastest(context, plan, candidates, timed, operations);
    if (scratch != nullptr) MB_CUDA(cudaFree(scratch));
    choices_.Add(key, fastest);
    return fastest;
  }

  // Whether a choice read from a file fits this problem here.
  static bool IsUsable(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Context& context) {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(Handle(), plan.operation, plan.first, plan.second, plan.result, plan.result, &algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= std::min(context.workspace_bytes, kGemmWorkspaceBytes);
  }

  std::mutex mutex_;
  GemmTuning tuning_;
  GemmChoices choices_;
  std::unordered_map<GemmKey, Plan, GemmKeyHash> plans_;
};

}  // namespace

void CublasGemm(const Context& context, const Matrix& a, const Matrix& b, const Matrix& c, const GemmOptions& options,
                const GemmBatch& batch) {
  Plans::Get().Multiply(context, a, b, c, options, batch);
}

void SetGemmTuning(const GemmTuning& tuning) { Plans::Get().SetTuning(tuning); }

void SaveGemmChoices() { Plans::Get().Save(); }

}  // namespace mbridge::cuda
