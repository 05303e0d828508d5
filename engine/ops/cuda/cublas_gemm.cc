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

// A row-major matrix.
struct Operand {
  Operand(const Matrix& x) : data(x.data), type(CudaType(x.dtype)), rows(x.rows), cols(x.cols), stride(x.stride) {}
  Operand(const Fp8Matrix& x)
      : data(x.data),
        type(x.format == Fp8Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2),
        rows(x.rows),
        cols(x.cols),
        stride(x.stride),
        inverse_scale(x.inverse_scale) {}
  void* data;
  cudaDataType_t type;
  int64_t rows, cols, stride;
  const float* inverse_scale = nullptr;  // Of 8-bit floats.
};

// c = alpha op(a) op(b) + beta c.
struct Problem {
  Operand a, b, c;
  bool transpose_a, transpose_b;
  float alpha, beta;
  GemmBatch batch = {};
  bool fast_accumulate = false;
  int64_t inner() const { return transpose_a ? a.rows : a.cols; }
};

// cuBLASLt's order is column-major, in which a row-major matrix is its transpose, with the same distance between lines.
cublasLtMatrixLayout_t LayoutOf(const Operand& x, int count, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MB_CUBLAS(cublasLtMatrixLayoutCreate(&layout, x.type, x.cols, x.rows, x.stride));
  if (count > 1) {
    const int32_t batch = count;
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return layout;
}

template <class T> void Set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  MB_CUBLAS(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

// Descriptors of one problem and the algorithm chosen for it. Lives as long as the process. c^T = op(b)^T op(a)^T: cuBLASLt's
// first operand is our b.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

cublasStatus_t Launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Problem& x, const Context& context) {
  return cublasLtMatmul(Handle(), plan.operation, &x.alpha, x.b.data, plan.first, x.a.data, plan.second, &x.beta, x.c.data,
                        plan.result, x.c.data, plan.result, &algorithm, context.workspace,
                        std::min(context.workspace_bytes, kGemmWorkspaceBytes), static_cast<cudaStream_t>(context.stream));
}

// Largest power of two up to 256 that divides the address.
uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256u : static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1)));
}

// beta is no part of it: adding to c takes the algorithm of the plain product.
GemmKey KeyOf(const Context& context, const Problem& x) {
  const int64_t types = x.a.type | x.b.type << 8 | x.c.type << 16 | int64_t{x.transpose_a} << 32 | int64_t{x.transpose_b} << 33 |
                        int64_t{x.fast_accumulate} << 34;
  const int64_t alignments = AlignmentOf(x.a.data) | int64_t{AlignmentOf(x.b.data)} << 16 | int64_t{AlignmentOf(x.c.data)} << 32;
  const auto workspace = static_cast<int64_t>(std::min(context.workspace_bytes, kGemmWorkspaceBytes));
  return {x.c.rows,   x.c.cols,  x.inner(),     x.a.stride,       x.b.stride,       x.c.stride,      types,
          alignments, workspace, x.batch.count, x.batch.stride_a, x.batch.stride_b, x.batch.stride_c};
}

Plan MakePlan(const Problem& x) {
  Plan plan;
  MB_CUBLAS(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  Set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, x.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  Set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, x.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (x.fast_accumulate) Set(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  plan.first = LayoutOf(x.b, x.batch.count, x.batch.stride_b);
  plan.second = LayoutOf(x.a, x.batch.count, x.batch.stride_a);
  plan.result = LayoutOf(x.c, x.batch.count, x.batch.stride_c);
  return plan;
}

// Addresses that the descriptor holds instead of the call.
void SetScales(const Plan& plan, const Problem& x) {
  if (x.a.inverse_scale == nullptr) return;
  Set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, x.b.inverse_scale);
  Set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x.a.inverse_scale);
}

void Destroy(const Plan& plan) {
  cublasLtMatrixLayoutDestroy(plan.first);
  cublasLtMatrixLayoutDestroy(plan.second);
  cublasLtMatrixLayoutDestroy(plan.result);
  cublasLtMatmulDescDestroy(plan.operation);
}

std::vector<cublasLtMatmulAlgo_t> Candidates(const Context& context, const Plan& plan, const Problem& x, int wanted) {
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
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, AlignmentOf(x.b.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, AlignmentOf(x.a.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, AlignmentOf(x.c.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, AlignmentOf(x.c.data));
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
  float Time(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Problem& x, int repeats) {
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
                             const Problem& x) {
  constexpr int kFinalists = 4, kRounds = 3;
  constexpr double kOperationsPerMs = 5e11, kWindowMs = 0.5;
  const double operations =
      2.0 * static_cast<double>(x.c.rows) * static_cast<double>(x.c.cols) * static_cast<double>(x.inner()) * x.batch.count;
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

  void Multiply(const Context& context, const Problem& x) {
    const GemmKey key = KeyOf(context, x);
    const std::lock_guard lock(mutex_);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan = MakePlan(x);
      SetScales(plan, x);
      plan.algorithm = Choose(context, key, plan, x);
      found = plans_.emplace(key, plan).first;
    }
    SetScales(found->second, x);
    if (const cublasStatus_t status = Launch(found->second, found->second.algorithm, x, context);
        status != CUBLAS_STATUS_SUCCESS) {
      ThrowEngineError("cuBLASLt, {}: {}", Describe(x), cublasLtGetStatusString(status));
    }
  }

 private:
  static std::string Describe(const Problem& x) {
    const auto name = [](cudaDataType_t type) {
      return type == CUDA_R_32F ? "F32" : type == CUDA_R_16BF ? "BF16" : type == CUDA_R_16F ? "F16" : "F8";
    };
    return fmt::format("product {}[{}, {}]{} x {}[{}, {}]{} into {}[{}, {}], row strides {}, {}, {}, batch {}", name(x.a.type),
                       x.a.rows, x.a.cols, x.transpose_a ? "^T" : "", name(x.b.type), x.b.rows, x.b.cols,
                       x.transpose_b ? "^T" : "", name(x.c.type), x.c.rows, x.c.cols, x.a.stride, x.b.stride, x.c.stride,
                       x.batch.count);
  }

  cublasLtMatmulAlgo_t Choose(const Context& context, const GemmKey& key, const Plan& plan, const Problem& x) {
    if (const cublasLtMatmulAlgo_t* known = choices_.Find(key); known != nullptr && IsUsable(plan, *known, context))
      return *known;
    const std::vector<cublasLtMatmulAlgo_t> candidates =
        Candidates(context, plan, x, tuning_.time_candidates ? tuning_.candidates : 1);
    if (candidates.empty()) ThrowEngineError("cuBLASLt has no algorithm for a {}", Describe(x));
    const auto stream = static_cast<cudaStream_t>(context.stream);
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    MB_CUDA(cudaStreamIsCapturing(stream, &capturing));
    if (candidates.size() == 1 || capturing != cudaStreamCaptureStatusNone) return candidates.front();
    Problem trial = x;
    trial.beta = 0.0f;
    void* scratch = nullptr;
    if (x.beta != 0.0f) {  // The sums in c must survive: results of the trials go elsewhere.
      const int64_t elements = (x.c.rows - 1) * x.c.stride + x.c.cols + (x.batch.count - 1) * x.batch.stride_c;
      if (cudaMalloc(&scratch, elements * sizeof(float) + 256) != cudaSuccess) {
        cudaGetLastError();
        return candidates.front();
      }
      trial.c.data = static_cast<char*>(scratch) + reinterpret_cast<uintptr_t>(x.c.data) % 256;
    }
    const cublasLtMatmulAlgo_t fastest = Fastest(context, plan, candidates, trial);
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
  Plans::Get().Multiply(
      context, {a, b, c, options.transpose_a, options.transpose_b, options.alpha, options.accumulate ? 1.0f : 0.0f, batch});
}

void CublasFp8Gemm(const Context& context, const Fp8Matrix& a, const Fp8Matrix& b, const Matrix& c,
                   const Fp8GemmOptions& options) {
  Plans::Get().Multiply(context, {a, b, c, false, true, 1.0f, options.accumulate ? 1.0f : 0.0f, {}, options.fast_accumulate});
}

void SetGemmTuning(const GemmTuning& tuning) { Plans::Get().SetTuning(tuning); }

void SaveGemmChoices() { Plans::Get().Save(); }

}  // namespace mbridge::cuda
