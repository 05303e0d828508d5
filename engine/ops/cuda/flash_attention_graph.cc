#include "engine/ops/cuda/flash_attention_graph.h"

#ifdef MB_CUDNN_FRONTEND

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include "engine/ops/qkv_layout.h"

namespace mbridge::cuda {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using Dims = std::vector<int64_t>;

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) ThrowEngineError("{}: {}", what, cudnnGetErrorString(status));
}

enum Uid : int64_t { kQuery = 1, kKey, kValue, kContext, kStats, kContextGrad, kQueryGrad, kKeyGrad, kValueGrad };

// cuDNN's [batch, head, sequence, channel] in our [s, b, groups, heads per group + 2, d]: it takes one stride from head to head,
// and the heads of one group are d apart, so that each group of each sample is a sample of its own. From the last group of a
// sample the same stride leads to the next sample. Without groups the heads are told as such.
struct Layout {
  explicit Layout(const FlashAttentionOptions& o) {
    const QkvLayout qkv{o.heads, o.groups, o.head_size};
    const int64_t per_group = qkv.heads_per_group(), slot = o.head_size, group = (per_group + 2) * slot;
    const int64_t row = o.batch * qkv.width(), context_row = o.batch * o.heads * o.head_size;
    const bool single = per_group == 1;
    const int64_t samples = single ? o.batch : o.batch * o.groups, heads = single ? o.heads : per_group;
    query_dims = {samples, heads, o.seq_length, o.head_size};
    key_dims = {samples, single ? heads : 1, o.seq_length, o.head_size};
    stats_dims = {samples, heads, o.seq_length, 1};
    qkv_strides = single ? Dims{qkv.width(), group, row, 1} : Dims{group, slot, row, 1};
    context_strides = {heads * o.head_size, o.head_size, context_row, 1};
    stats_strides = {heads * o.seq_length, o.seq_length, 1, 1};
    key_offset = per_group * slot, value_offset = key_offset + slot;
  }
  Dims query_dims, key_dims, stats_dims, qkv_strides, context_strides, stats_strides;
  int64_t key_offset, value_offset;  // Elements.
};

class Graph : public FlashAttentionGraph {
 public:
  Graph(const FlashAttentionOptions& options, DType dtype, bool backward)
      : options_(options), layout_(options), element_size_(static_cast<int64_t>(SizeOf(dtype))), backward_(backward) {
    graph_.set_io_data_type(dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const TensorPtr query = Input("query", kQuery, layout_.query_dims, layout_.qkv_strides);
    const TensorPtr key = Input("key", kKey, layout_.key_dims, layout_.qkv_strides);
    const TensorPtr value = Input("value", kValue, layout_.key_dims, layout_.qkv_strides);
    if (backward) {
      const TensorPtr context = Input("context", kContext, layout_.query_dims, layout_.context_strides);
      const TensorPtr grad = Input("context gradient", kContextGrad, layout_.query_dims, layout_.context_strides);
      const TensorPtr stats = Input("stats", kStats, layout_.stats_dims, layout_.stats_strides);
      stats->set_data_type(fe::DataType_t::FLOAT);
      auto attributes = Attributes<fe::graph::SDPA_backward_attributes>();
      attributes.set_deterministic_algorithm(options.deterministic);
      const auto [query_grad, key_grad, value_grad] = graph_.sdpa_backward(query, key, value, context, grad, stats, attributes);
      Output(query_grad, kQueryGrad, layout_.query_dims, layout_.qkv_strides);
      Output(key_grad, kKeyGrad, layout_.key_dims, layout_.qkv_strides);
      Output(value_grad, kValueGrad, layout_.key_dims, layout_.qkv_strides);
    } else {
      auto attributes = Attributes<fe::graph::SDPA_attributes>();
      attributes.set_generate_stats(true);
      const auto [context, stats] = graph_.sdpa(query, key, value, attributes);
      Output(context, kContext, layout_.query_dims, layout_.context_strides);
      Output(stats, kStats, layout_.stats_dims, layout_.stats_strides);
      stats->set_data_type(fe::DataType_t::FLOAT);
    }
  }

  // An engine that keeps to FlashAttentionWorkspaceBytes.
  void ChooseEngine(cudnnHandle_t handle) {
    Check(graph_.validate());
    Check(graph_.build_operation_graph(handle));
    Check(graph_.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
    graph_.deselect_workspace_greater_than(FlashAttentionWorkspaceBytes(options_) - FrontendBytes());
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
    Check(graph_.execute(static_cast<cudnnHandle_t>(handle), pointers, workspace));
  }

 private:
  TensorPtr Input(const char* name, int64_t uid, const Dims& dims, const Dims& strides) {
    return graph_.tensor(fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims).set_stride(strides));
  }
  static void Output(const TensorPtr& tensor, int64_t uid, const Dims& dims, const Dims& strides) {
    tensor->set_output(true).set_uid(uid).set_dim(dims).set_stride(strides);
  }

  template <class A> A Attributes() const {
    A attributes;
    attributes.set_name("attention")
        .set_attn_scale(options_.scale)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (options_.window > 0 && options_.window < options_.seq_length) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(options_.window));
    }
    return attributes;
  }

  // What cudnn-frontend lays into the workspace beside the engine's part: row sums of dO O, F32 sums of dQ, a little more.
  int64_t FrontendBytes() const {
    constexpr int64_t kMore = 64 << 10;
    const int64_t rows = options_.batch * options_.heads * options_.seq_length;
    return kMore + (backward_ ? rows * 4 * (options_.deterministic ? 1 : 1 + options_.head_size) : 0);
  }

  void* At(void* base, int64_t elements) const { return static_cast<char*>(base) + elements * element_size_; }

  void Check(fe::error_t error) const {
    if (error.is_good()) return;
    const auto& o = options_;
    ThrowEngineError("cuDNN {}: flash attention {} of {} x {} tokens, {} heads in {} groups of size {}, window {}: {}",
                     cudnnGetVersion(), backward_ ? "backward" : "forward", o.batch, o.seq_length, o.heads, o.groups, o.head_size,
                     o.window, error.get_message());
  }

  FlashAttentionOptions options_;
  Layout layout_;
  int64_t element_size_;
  bool backward_;
  int64_t workspace_bytes_ = 0;
  fe::graph::Graph graph_;
};

}  // namespace

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
