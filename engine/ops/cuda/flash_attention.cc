#include "engine/ops/flash_attention.h"

#include <map>
#include <mutex>
#include <tuple>

#include "engine/ops/cuda/flash_attention_graph.h"
#include "engine/ops/cuda/flash_packing.h"
#include "engine/ops/qkv_layout.h"

namespace mbridge::cuda {
namespace {

// The plans of the process. One caller at a time.
class Graphs {
 public:
  static Graphs& Get() {
    static auto* graphs = new Graphs;
    return *graphs;
  }

  void Prepare(const Context& context, const FlashAttentionOptions& options, DType dtype) {
    const std::lock_guard lock(mutex_);
    for (const bool backward : {false, true}) Find(options, dtype, backward, HandleOf(context));
  }

  void Run(const Context& context, const FlashAttentionOptions& options, DType dtype,
           const FlashAttentionGraph::Pointers& pointers, const Tensor& workspace) {
    const std::lock_guard lock(mutex_);
    void* handle = HandleOf(context);
    const FlashAttentionGraph& graph = Find(options, dtype, pointers.d_qkv != nullptr, handle);
    const int64_t packing = FlashPackingBytes(options);
    if (static_cast<int64_t>(workspace.bytes()) < graph.workspace_bytes() + packing) {
      ThrowEngineError("flash attention workspace of {} bytes, {} needed", workspace.bytes(), graph.workspace_bytes() + packing);
    }
    FlashAttentionGraph::Pointers all = pointers;
    if (packing > 0) {
      all.packing = workspace.data;
      FillFlashPacking(context, options, workspace.data);
    }
    if (options.dropout > 0) all.random = options.random.data;
    graph.Run(handle, all, static_cast<char*>(workspace.data) + packing);
  }

 private:
  using Key =
      std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, bool, int64_t, int64_t, double, DType, bool>;

  static void* HandleOf(const Context& context) {
    thread_local CudnnHandle handle;
    return handle.Use(context.stream);
  }

  const FlashAttentionGraph& Find(const FlashAttentionOptions& o, DType dtype, bool backward, void* handle) {
    const Key key(o.seq_length, o.batch, o.heads, o.groups, o.head_size, o.scale, o.window, o.deterministic, o.value_width(),
                  o.sequences, o.dropout, dtype, backward);
    std::unique_ptr<FlashAttentionGraph>& graph = graphs_[key];
    if (graph == nullptr) {
      if (const std::string refusal = FlashAttentionRefusal(o, dtype); !refusal.empty()) ThrowEngineError("{}", refusal);
      graph = FlashAttentionGraph::ForGpu(o, dtype, backward, handle);
    }
    return *graph;
  }

  std::mutex mutex_;
  std::map<Key, std::unique_ptr<FlashAttentionGraph>> graphs_;
};

void ExpectSize(const char* name, const Tensor& tensor, DType dtype, int64_t elements) {
  if (tensor.dtype != dtype || tensor.size() != elements) {
    ThrowEngineError("flash attention: {} is {}{}, {} elements of {} expected", name, NameOf(tensor.dtype),
                     tensor.shape.ToString(), elements, NameOf(dtype));
  }
}

void CheckTensors(const FlashAttentionOptions& o, const Tensor& qkv, const Tensor& context, const Tensor& stats) {
  const int64_t tokens = o.seq_length * o.batch;
  ExpectSize("qkv", qkv, qkv.dtype, tokens * QkvLayout{o.heads, o.groups, o.head_size, o.value_width()}.width());
  ExpectSize("context", context, qkv.dtype, tokens * o.heads * o.value_width());
  ExpectSize("stats", stats, DType::kF32, tokens * o.heads);
  if (o.dropout > 0) {
    if (o.random.empty()) ThrowEngineError("flash attention with dropout wants a seed and an offset");
    ExpectSize("random", o.random, DType::kI64, 2);
  }
}

void Prepare(const Context& context, const FlashAttentionOptions& options, DType dtype) {
  Graphs::Get().Prepare(context, options, dtype);
}

void Forward(const Context& context, const Tensor& qkv, const FlashAttentionOptions& options, const Tensor& stats,
             const Tensor& output, const Tensor& workspace) {
  CheckTensors(options, qkv, output, stats);
  Graphs::Get().Run(context, options, qkv.dtype, {qkv.data, output.data, stats.data}, workspace);
}

void Backward(const Context& context, const Tensor& d_context, const Tensor& qkv, const Tensor& output, const Tensor& stats,
              const FlashAttentionOptions& options, const Tensor& d_qkv, const Tensor& workspace) {
  CheckTensors(options, qkv, output, stats);
  ExpectSize("d_context", d_context, qkv.dtype, output.size());
  ExpectSize("d_qkv", d_qkv, qkv.dtype, qkv.size());
  Graphs::Get().Run(context, options, qkv.dtype, {qkv.data, output.data, stats.data, d_context.data, d_qkv.data}, workspace);
}

const bool g_registered = (g_flash_attention_backend = &FlashAttentionBackend, PrepareFlashAttention.cuda = &Prepare,
                           FlashAttentionForward.cuda = &Forward, FlashAttentionBackward.cuda = &Backward, true);

}  // namespace
}  // namespace mbridge::cuda
