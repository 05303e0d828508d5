#include "engine/ops/cuda/flash_attention_graph.h"

#ifdef MB_CUDNN_FRONTEND

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include "engine/core/cuda/check.h"
#include "engine/ops/cuda/flash_packing.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge::cuda {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using Dims = std::vector<int64_t>;

// Either memory: of the host where cuDNN keeps its plans, or of the GPU.
bool IsAllocationFailure(cudnnStatus_t status) {
  return status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
         status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
}

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  ThrowFailure(IsAllocationFailure(status), fmt::format("{}: {}", what, cudnnGetErrorString(status)));
}

enum Uid : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kContext,
  kStats,
  kContextGrad,
  kQueryGrad,
  kKeyGrad,
  kValueGrad,
  kSeed,
  kOffset,
  kLengths,
  kQkvStarts,
  kContextStarts,
  kStatsStarts
};

// cuDNN's [batch, head, sequence, channel] in our [s, b, groups, heads per group + 2, d]: it takes one stride from head to head,
// and the heads of one group are d apart, so that each group of each sample is a sample of its own. From the last group of a
// sample the same stride leads to the next sample. Without groups the heads are told as such. Packed sequences are samples, each
// with its first element (flash_packing.h); their stats lie token by token.
struct Layout {
  explicit Layout(const FlashAttentionOptions& o) {
    const QkvLayout qkv{o.heads, o.groups, o.head_size, o.value_width()};
    const int64_t per_group = qkv.heads_per_group(), slot = o.head_size, value = o.value_width(), group = qkv.group_width();
    const int64_t row = o.batch * qkv.width(), context_row = o.batch * o.heads * value;
    const bool single = per_group == 1, packed = o.sequences > 0;
    const int64_t samples = packed ? FlashPackedParts(o) : single ? o.batch : o.batch * o.groups;
    const int64_t heads = single ? o.heads : per_group, key_heads = single ? heads : 1;
    query_dims = {samples, heads, o.seq_length, slot};
    key_dims = {samples, key_heads, o.seq_length, slot};
    value_dims = {samples, key_heads, o.seq_length, value};
    context_dims = {samples, heads, o.seq_length, value};
    stats_dims = {samples, heads, o.seq_length, 1};
    qkv_strides = single ? Dims{qkv.width(), group, row, 1} : Dims{group, slot, row, 1};
    context_strides = {heads * value, value, context_row, 1};
    stats_strides = packed ? Dims{heads, 1, o.batch * o.heads, 1} : Dims{heads * o.seq_length, o.seq_length, 1, 1};
    key_offset = per_group * slot, value_offset = key_offset + slot;
  }
  Dims query_dims, key_dims, value_dims, context_dims, stats_dims, qkv_strides, context_strides, stats_strides;
  int64_t key_offset, value_offset;  // Elements.
};

class Graph : public FlashAttentionGraph {
 public:
  Graph(const FlashAttentionOptions& options, DType dtype, bool backward)
      : options_(options), layout_(options), element_size_(static_cast<int64_t>(SizeOf(dtype))), backward_(backward) {
    graph_.set_io_data_type(dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (options.sequences > 0) {
      const int64_t parts = FlashPackedParts(options);
      lengths_ = Array("lengths", kLengths, parts, fe::DataType_t::INT32);
      qkv_starts_ = Array("starts in qkv", kQkvStarts, parts + 1, fe::DataType_t::INT32);
      context_starts_ = Array("starts in context", kContextStarts, parts + 1, fe::DataType_t::INT32);
      stats_starts_ = Array("starts in stats", kStatsStarts, parts + 1, fe::DataType_t::INT32);
    }
    const TensorPtr query = Input("query", kQuery, layout_.query_dims, layout_.qkv_strides, qkv_starts_);
    const TensorPtr key = Input("key", kKey, layout_.key_dims, layout_.qkv_strides, qkv_starts_);
    const TensorPtr value = Input("value", kValue, layout_.value_dims, layout_.qkv_strides, qkv_starts_);
    if (backward) {
      const TensorPtr context = Input("context", kContext, layout_.context_dims, layout_.context_strides, context_starts_);
      const TensorPtr grad =
          Input("context gradient", kContextGrad, layout_.context_dims, layout_.context_strides, context_starts_);
      const TensorPtr stats = Input("stats", kStats, layout_.stats_dims, layout_.stats_strides, stats_starts_);
      stats->set_data_type(fe::DataType_t::FLOAT);
      auto attributes = Attributes<fe::graph::SDPA_backward_attributes>();
      attributes.set_deterministic_algorithm(options.deterministic);
      if (options.sequences > 0) {
        attributes.set_max_total_seq_len_q(options.seq_length).set_max_total_seq_len_kv(options.seq_length);
      }
      const auto [query_grad, key_grad, value_grad] = graph_.sdpa_backward(query, key, value, context, grad, stats, attributes);
      Output(query_grad, kQueryGrad, layout_.query_dims, layout_.qkv_strides, qkv_starts_);
      Output(key_grad, kKeyGrad, layout_.key_dims, layout_.qkv_strides, qkv_starts_);
      Output(value_grad, kValueGrad, layout_.value_dims, layout_.qkv_strides, qkv_starts_);
    } else {
      auto attributes = Attributes<fe::graph::SDPA_attributes>();
      attributes.set_generate_stats(true);
      const auto [context, stats] = graph_.sdpa(query, key, value, attributes);
      Output(context, kContext, layout_.context_dims, layout_.context_strides, context_starts_);
      Output(stats, kStats, layout_.stats_dims, layout_.stats_strides, stats_starts_);
      stats->set_data_type(fe::DataType_t::FLOAT);
    }
  }

  // An engine that keeps to FlashAttentionWorkspaceBytes.
  void ChooseEngine(cudnnHandle_t handle) {
    Check(graph_.validate());
    Check(graph_.build_operation_graph(handle));
    Check(graph_.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
    graph_.deselect_workspace_greater_than(FlashAttentionWorkspaceBytes(options_) - FlashPackingBytes(options_) -
                                           FrontendBytes());
    Check(graph_.check_support());
  }

  void BuildPlan() {
    Check(graph_.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
    Check(graph_.get_workspace_size(workspace_bytes_));
  }

  void SetDevice(const std::string& json) {
    auto properties = std::make_shared<fe::DeviceProperties>();
    Check(properties->deserialize(std::vector<uint8_t>(json.begin(), json.end())));
    graph_.set_device_properties(properties);
  }

  int64_t workspace_bytes() const override { return workspace_bytes_; }

  std::string engine() const override {
    std::string name;
    Check(graph_.get_plan_name(name));
    return name;
  }

  void Run(void* handle, const Pointers& p, void* workspace) const override {
    std::unordered_map<int64_t, void*> pointers = {{kQuery, p.qkv},
                                                   {kKey, At(p.qkv, layout_.key_offset)},
                                                   {kValue, At(p.qkv, layout_.value_offset)},
                                                   {kContext, p.context},
                                                   {kStats, p.stats}};
    if (backward_) {
      pointers.insert({{kContextGrad, p.d_context},
                       {kQueryGrad, p.d_qkv},
                       {kKeyGrad, At(p.d_qkv, layout_.key_offset)},
                       {kValueGrad, At(p.d_qkv, layout_.value_offset)}});
    }
    if (options_.dropout > 0) pointers.insert({{kSeed, p.random}, {kOffset, static_cast<int64_t*>(p.random) + 1}});
    if (options_.sequences > 0) {
      const FlashPacking packing(options_);
      const auto array = [&p](int64_t bytes) { return static_cast<void*>(static_cast<char*>(p.packing) + bytes); };
      pointers.insert({{kLengths, array(packing.lengths())},
                       {kQkvStarts, array(packing.qkv())},
                       {kContextStarts, array(packing.context())},
                       {kStatsStarts, array(packing.stats())}});
    }
    Check(graph_.execute(static_cast<cudnnHandle_t>(handle), pointers, workspace));
  }

 private:
  // `starts`: of packed sequences, or null.
  TensorPtr Input(const char* name, int64_t uid, const Dims& dims, const Dims& strides, const TensorPtr& starts) {
    const TensorPtr tensor =
        graph_.tensor(fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims).set_stride(strides));
    if (starts != nullptr) tensor->set_ragged_offset(starts);
    return tensor;
  }
  static void Output(const TensorPtr& tensor, int64_t uid, const Dims& dims, const Dims& strides, const TensorPtr& starts) {
    tensor->set_output(true).set_uid(uid).set_dim(dims).set_stride(strides);
    if (starts != nullptr) tensor->set_ragged_offset(starts);
  }
  TensorPtr Array(const char* name, int64_t uid, int64_t count, fe::DataType_t type) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_name(name)
                             .set_uid(uid)
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }

  template <class A> A Attributes() {
    A attributes;
    attributes.set_name("attention")
        .set_attn_scale(options_.scale)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (options_.window > 0 && options_.window < options_.seq_length) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(options_.window));
    }
    if (options_.dropout > 0) {
      attributes.set_dropout(static_cast<float>(options_.dropout), Array("seed", kSeed, 1, fe::DataType_t::INT64),
                             Array("offset", kOffset, 1, fe::DataType_t::INT64));
    }
    if (options_.sequences > 0) attributes.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
    return attributes;
  }

  // What cudnn-frontend lays into the workspace beside the engine's part: row sums of dO O, F32 sums of dQ, a little more.
  int64_t FrontendBytes() const {
    constexpr int64_t kMore = 64 << 10;
    if (options_.sequences > 0) {
      const int64_t tokens = options_.seq_length * options_.batch, per_group = options_.heads / options_.groups;
      const int64_t row = QkvLayout{options_.heads, options_.groups, options_.head_size, options_.value_width()}.width();
      return kMore + (backward_ ? tokens * 4 * (options_.heads + row + (per_group == 1 ? 0 : 2 * row * per_group)) : 0);
    }
    const int64_t rows = options_.batch * options_.heads * options_.seq_length;
    return kMore + (backward_ ? rows * 4 * (options_.deterministic ? 1 : 1 + options_.head_size) : 0);
  }

  void* At(void* base, int64_t elements) const { return static_cast<char*>(base) + elements * element_size_; }

  void Check(fe::error_t error) const {
    if (error.is_good()) return;
    const auto& o = options_;
    const std::string message = error.get_message();
    ThrowFailure(
        SaysAllocationFailed(message),
        fmt::format("cuDNN {}: flash attention {} of {} x {} tokens, {} heads in {} groups of size {} and {}, window {}, "
                    "dropout {}, {} packed sequences: {}",
                    cudnnGetVersion(), backward_ ? "backward" : "forward", o.batch, o.seq_length, o.heads, o.groups, o.head_size,
                    o.value_width(), o.window, o.dropout, o.sequences, message));
  }

  FlashAttentionOptions options_;
  Layout layout_;
  TensorPtr lengths_, qkv_starts_, context_starts_, stats_starts_;  // Null without packed sequences.
  int64_t element_size_;
  bool backward_;
  int64_t workspace_bytes_ = 0;
  fe::graph::Graph graph_;
};

}  // namespace

bool SaysAllocationFailed(const std::string& message) {
  const auto says = [&](const char* text) { return message.find(text) != std::string::npos; };
  return says(cudnnGetErrorString(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED)) ||
         says(cudnnGetErrorString(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)) ||
         says(cudaGetErrorString(cudaErrorMemoryAllocation));
}

std::string FlashAttentionBackend() { return ""; }

CudnnHandle::CudnnHandle() {
  cudnnHandle_t handle = nullptr;
  CheckCudnn(cudnnCreate(&handle), "cudnnCreate");
  handle_ = handle;
}

CudnnHandle::~CudnnHandle() { cudnnDestroy(static_cast<cudnnHandle_t>(handle_)); }

void* CudnnHandle::Use(void* stream) {
  CheckCudnn(cudnnSetStream(static_cast<cudnnHandle_t>(handle_), static_cast<cudaStream_t>(stream)), "cudnnSetStream");
  return handle_;
}

std::unique_ptr<FlashAttentionGraph> FlashAttentionGraph::ForGpu(const FlashAttentionOptions& options, DType dtype, bool backward,
                                                                 void* handle) {
  auto graph = std::make_unique<Graph>(options, dtype, backward);
  graph->ChooseEngine(static_cast<cudnnHandle_t>(handle));
  graph->BuildPlan();
  return graph;
}

void FlashAttentionGraph::CheckOnDescribedGpu(const FlashAttentionOptions& options, DType dtype, bool backward,
                                              const std::string& device_json) {
  auto graph = std::make_unique<Graph>(options, dtype, backward);
  graph->SetDevice(device_json);
  graph->ChooseEngine(nullptr);
}

}  // namespace mbridge::cuda

#else

namespace mbridge::cuda {

std::string FlashAttentionBackend() {
  return "this program was built without cuDNN or cudnn-frontend, which flash attention needs (MB_CUDNN_FRONTEND_DIR)";
}

bool SaysAllocationFailed(const std::string&) { return false; }

CudnnHandle::CudnnHandle() { ThrowEngineError("{}", FlashAttentionBackend()); }
CudnnHandle::~CudnnHandle() = default;
void* CudnnHandle::Use(void*) { return handle_; }

std::unique_ptr<FlashAttentionGraph> FlashAttentionGraph::ForGpu(const FlashAttentionOptions&, DType, bool, void*) {
  ThrowEngineError("{}", FlashAttentionBackend());
}

void FlashAttentionGraph::CheckOnDescribedGpu(const FlashAttentionOptions&, DType, bool, const std::string&) {
  ThrowEngineError("{}", FlashAttentionBackend());
}

}  // namespace mbridge::cuda

#endif
