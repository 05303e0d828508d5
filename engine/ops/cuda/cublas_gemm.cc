#include "engine/ops/cuda/cublas_gemm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "engine/core/cuda/check.h"
#include "engine/ops/cuda/cublas_check.h"
#include "engine/ops/cuda/gemm_choices.h"
#include "engine/ops/cuda/gemm_tuning.h"
#include "engine/ops/cuda/trial_times.h"

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
  // NOLINTBEGIN(google-explicit-constructor): a Problem is made of either kind.
  Operand(const Matrix& x) : data(x.data), type(CudaType(x.dtype)), rows(x.rows), cols(x.cols), stride(x.stride) {}
  Operand(const Fp8Matrix& x)
      : data(x.data),
        type(x.format == Fp8Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2),
        rows(x.rows),
        cols(x.cols),
        stride(x.stride),
        inverse_scale(x.inverse_scale),
        scaling(x.scaling) {}
  // NOLINTEND(google-explicit-constructor)
  void* data;
  cudaDataType_t type;
  int64_t rows, cols, stride;
  const float* inverse_scale = nullptr;  // Of 8-bit floats.
  Fp8Scaling scaling = Fp8Scaling::kTensor;
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

struct Destroy {
  void operator()(cublasLtMatmulDesc_t x) const { cublasLtMatmulDescDestroy(x); }
  void operator()(cublasLtMatrixLayout_t x) const { cublasLtMatrixLayoutDestroy(x); }
  void operator()(cublasLtMatmulPreference_t x) const { cublasLtMatmulPreferenceDestroy(x); }
};
template <class T> using Owned = std::unique_ptr<std::remove_pointer_t<T>, Destroy>;

// cuBLASLt's order is column-major, in which a row-major matrix is its transpose, with the same distance between lines.
Owned<cublasLtMatrixLayout_t> LayoutOf(const Operand& x, int count, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MB_CUBLAS(cublasLtMatrixLayoutCreate(&layout, x.type, x.cols, x.rows, x.stride));
  Owned<cublasLtMatrixLayout_t> owned(layout);
  if (count > 1) {
    const int32_t batch = count;
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    MB_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return owned;
}

// Descriptors of one problem and the algorithm chosen for it. c^T = op(b)^T op(a)^T: cuBLASLt's
// first operand is our b.
struct Plan {
  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> first, second, result;
  cublasLtMatmulAlgo_t algorithm{};

  template <class T> void Set(cublasLtMatmulDescAttributes_t attribute, const T& value) const {
    MB_CUBLAS(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value));
  }
};

cublasStatus_t Launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Problem& x, const Context& context) {
  return cublasLtMatmul(Handle(), plan.operation.get(), &x.alpha, x.b.data, plan.first.get(), x.a.data, plan.second.get(),
                        &x.beta, x.c.data, plan.result.get(), x.c.data, plan.result.get(), &algorithm, context.workspace,
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
                        int64_t{x.fast_accumulate} << 34 | static_cast<int64_t>(x.a.scaling) << 35 |
                        static_cast<int64_t>(x.b.scaling) << 37;
  const int64_t alignments = AlignmentOf(x.a.data) | int64_t{AlignmentOf(x.b.data)} << 16 | int64_t{AlignmentOf(x.c.data)} << 32;
  const auto workspace = static_cast<int64_t>(std::min(context.workspace_bytes, kGemmWorkspaceBytes));
  return {x.c.rows,   x.c.cols,  x.inner(),     x.a.stride,       x.b.stride,       x.c.stride,      types,
          alignments, workspace, x.batch.count, x.batch.stride_a, x.batch.stride_b, x.batch.stride_c};
}

cublasLtMatmulMatrixScale_t ScaleMode(Fp8Scaling scaling) {
  switch (scaling) {
    case Fp8Scaling::kTensor: break;
    case Fp8Scaling::kVectors: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Fp8Scaling::kSquares: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

Plan MakePlan(const Problem& x) {
  Plan plan;
  cublasLtMatmulDesc_t operation = nullptr;
  MB_CUBLAS(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  plan.operation.reset(operation);
  plan.Set(CUBLASLT_MATMUL_DESC_TRANSA, x.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  plan.Set(CUBLASLT_MATMUL_DESC_TRANSB, x.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (x.fast_accumulate) plan.Set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  if (x.a.scaling != Fp8Scaling::kTensor) {
    plan.Set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, ScaleMode(x.b.scaling));
    plan.Set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, ScaleMode(x.a.scaling));
  }
  plan.first = LayoutOf(x.b, x.batch.count, x.batch.stride_b);
  plan.second = LayoutOf(x.a, x.batch.count, x.batch.stride_a);
  plan.result = LayoutOf(x.c, x.batch.count, x.batch.stride_c);
  return plan;
}

// Addresses that the descriptor holds instead of the call.
void SetScales(const Plan& plan, const Problem& x) {
  if (x.a.inverse_scale == nullptr) return;
  plan.Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, x.b.inverse_scale);
  plan.Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x.a.inverse_scale);
}

std::vector<cublasLtMatmulAlgo_t> Candidates(const Context& context, const Plan& plan, const Problem& x, int wanted) {
  cublasLtMatmulPreference_t preference = nullptr;
  MB_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
  const Owned<cublasLtMatmulPreference_t> owner(preference);
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
  MB_CUBLAS(cublasLtMatmulAlgoGetHeuristic(Handle(), plan.operation.get(), plan.first.get(), plan.second.get(), plan.result.get(),
                                           plan.result.get(), preference, static_cast<int>(found.size()), found.data(), &count));
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
  }
  return algorithms;
}

// Times algorithms as a step runs them: behind a stretch of products that brings the GPU to its working clocks and power, with
// launches queued ahead of it, and each after the L2 cache was overwritten.
class Trials {
 public:
  Trials(const Context& context, const Plan& plan, const Problem& problem)
      : context_(context), plan_(plan), problem_(problem), stream_(static_cast<cudaStream_t>(context.stream)) {}
  ~Trials() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    cudaFree(evicting_);
    cudaFree(result_);
  }
  Trials(const Trials&) = delete;
  Trials& operator=(const Trials&) = delete;

  // False where there is no memory for it. Sums in c must survive: then results go elsewhere.
  bool Allocate() {
    const Problem& x = problem_;
    if (cudaMalloc(&evicting_, kEvictedBytes) != cudaSuccess) return Failed();
    if (x.beta == 0.0f) return true;
    const int64_t elements = (x.c.rows - 1) * x.c.stride + x.c.cols + (x.batch.count - 1) * x.batch.stride_c;
    const size_t bytes = static_cast<size_t>(elements) * sizeof(float) + 256;
    if (cudaMalloc(&result_, bytes) != cudaSuccess) return Failed();
    MB_CUDA(cudaMemsetAsync(result_, 0, bytes, stream_));
    problem_.c.data = static_cast<char*>(result_) + reinterpret_cast<uintptr_t>(x.c.data) % 256;
    return true;
  }

  // `rounds` times of each algorithm, taken in turn.
  std::vector<TrialTimes> Run(const std::vector<cublasLtMatmulAlgo_t>& algorithms, int rounds) {
    std::vector<bool> usable;
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms) usable.push_back(Multiply(algorithm));  // Loads the kernels.
    std::vector<TrialTimes> times(algorithms.size());
    for (int round = 0; round < rounds; ++round) {
      WarmUp(algorithms.front(), round == 0 ? kWarmMs : kWarmMs / 10);
      while (events_.size() < 2 * algorithms.size()) MB_CUDA(cudaEventCreate(&events_.emplace_back()));
      for (size_t i = 0; i < algorithms.size(); ++i) {
        if (!usable[i]) continue;
        MB_CUDA(cudaMemsetAsync(evicting_, 0, kEvictedBytes, stream_));
        MB_CUDA(cudaEventRecord(events_[2 * i], stream_));
        Multiply(algorithms[i]);
        MB_CUDA(cudaEventRecord(events_[2 * i + 1], stream_));
      }
      MB_CUDA(cudaStreamSynchronize(stream_));
      for (size_t i = 0; i < algorithms.size(); ++i) {
        float milliseconds = INFINITY;
        if (usable[i]) MB_CUDA(cudaEventElapsedTime(&milliseconds, events_[2 * i], events_[2 * i + 1]));
        times[i].push_back(milliseconds);
      }
    }
    return times;
  }

 private:
  static constexpr size_t kEvictedBytes = size_t{128} << 20;  // More than twice an H200's L2 cache.
  static constexpr double kWarmMs = 40, kOperationsPerMs = 6e11;

  bool Failed() {
    cudaGetLastError();
    return false;
  }
  bool Multiply(const cublasLtMatmulAlgo_t& algorithm) {
    return Launch(plan_, algorithm, problem_, context_) == CUBLAS_STATUS_SUCCESS;
  }
  void WarmUp(const cublasLtMatmulAlgo_t& algorithm, double milliseconds) {
    const Problem& x = problem_;
    const double operations =
        2.0 * static_cast<double>(x.c.rows) * static_cast<double>(x.c.cols) * static_cast<double>(x.inner()) * x.batch.count;
    const int calls = std::clamp(static_cast<int>(milliseconds * kOperationsPerMs / (operations + 1.0)), 1, 200);
    for (int i = 0; i < calls; ++i) Multiply(algorithm);
  }

  const Context& context_;
  const Plan& plan_;
  Problem problem_;
  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  void *evicting_ = nullptr, *result_ = nullptr;
};

// A few rounds over all candidates, then more over the first suggestion and the best of the others.
cublasLtMatmulAlgo_t Fastest(Trials& trials, const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
  constexpr size_t kFinalists = 4;
  constexpr int kRounds = 3, kFinalRounds = 9;
  constexpr float kMargin = 0.02f;
  const std::vector<TrialTimes> times = trials.Run(algorithms, kRounds);
  std::vector<size_t> order;
  for (size_t i = 1; i < algorithms.size(); ++i) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return MedianOf(times[a]) < MedianOf(times[b]); });
  std::vector<cublasLtMatmulAlgo_t> finalists = {algorithms.front()};
  for (const size_t i : order) {
    if (finalists.size() < kFinalists && std::isfinite(MedianOf(times[i]))) finalists.push_back(algorithms[i]);
  }
  return finalists[PickFastest(trials.Run(finalists, kFinalRounds), kMargin)];
}

// What MB_TIME_GEMMS asks for.
GemmTuning TuningFromEnvironment() {
  const char* value = std::getenv("MB_TIME_GEMMS");
  if (value == nullptr || std::string_view(value).empty() || std::string_view(value) == "0") return {};
  return {.time_candidates = true, .cache_file = std::string_view(value) == "1" ? "" : value};
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
    plans_.clear();
    tuning_ = tuning;
    choices_ = GemmChoices(tuning.cache_file);
  }

  void Multiply(const Context& context, const Problem& x) {
    const GemmKey key = KeyOf(context, x);
    const std::lock_guard lock(mutex_);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan = MakePlan(x);
      SetScales(plan, x);
      plan.algorithm = Choose(context, key, plan, x);
      found = plans_.emplace(key, std::move(plan)).first;
    }
    SetScales(found->second, x);
    if (const cublasStatus_t status = Launch(found->second, found->second.algorithm, x, context);
        status != CUBLAS_STATUS_SUCCESS) {
      ThrowCublas(status, "cuBLASLt, " + Describe(x));
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
    Trials trials(context, plan, x);
    if (!trials.Allocate()) return candidates.front();
    const cublasLtMatmulAlgo_t fastest = Fastest(trials, candidates);
    choices_.Add(key, fastest);
    choices_.Save();
    return fastest;
  }

  // Whether a choice read from a file fits this problem here.
  static bool IsUsable(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Context& context) {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(Handle(), plan.operation.get(), plan.first.get(), plan.second.get(), plan.result.get(),
                                   plan.result.get(), &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= std::min(context.workspace_bytes, kGemmWorkspaceBytes);
  }

  std::mutex mutex_;
  GemmTuning tuning_ = TuningFromEnvironment();
  GemmChoices choices_{tuning_.cache_file};
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

bool HasFp8BlockProducts(const Context& context) {
  int device = 0, major = 0, minor = 0;
  MB_CUDA(cudaGetDevice(&device));
  MB_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MB_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) return false;
  // Sides and addresses of the products of training: forward, input gradient, weight gradient.
  constexpr int64_t kSide = 1024;
  static float scale = 1.0f;
  const auto offers = [&](Fp8Scaling b, Fp8Format of_a, DType of_c) {
    const Fp8Matrix left{nullptr, of_a, &scale, kSide, kSide, kSide, Fp8Scaling::kVectors};
    const Fp8Matrix right{nullptr, Fp8Format::kE4M3, &scale, kSide, kSide, kSide, b};
    const Problem x{left, right, Matrix{nullptr, of_c, kSide, kSide, kSide}, false, true, 1.0f, 0.0f};
    const Plan plan = MakePlan(x);
    SetScales(plan, x);
    try {
      return !Candidates(context, plan, x, 1).empty();
    } catch (const EngineError& error) {  // "Not supported" is an answer.
      if (error.reason() == v1::REASON_OUT_OF_MEMORY) throw;
      return false;
    }
  };
  return offers(Fp8Scaling::kSquares, Fp8Format::kE4M3, DType::kBF16) &&
         offers(Fp8Scaling::kSquares, Fp8Format::kE5M2, DType::kBF16) &&
         offers(Fp8Scaling::kVectors, Fp8Format::kE5M2, DType::kF32);
}

void SetGemmTuning(const GemmTuning& tuning) { Plans::Get().SetTuning(tuning); }

}  // namespace mbridge::cuda
