#include "engine/model/output_head.h"

#include <algorithm>

#include "engine/ops/convert.h"
#include "engine/ops/gemm.h"
#include "engine/ops/softmax_cross_entropy.h"

namespace mbridge {
namespace {

// A tile of 2048 tokens and 2000 columns is 16 MB of F32: it stays in the last-level cache between its product and its use. A GPU
// takes all columns at once, for as many tokens as make two gigabytes of logits: each block reads and writes the F32 gradient of
// the whole table.
constexpr int64_t kTokenBlock = 2048, kTileColumns = 2000, kGpuLogitBytes = int64_t{2} << 30;
// Rows not a power of two apart, to spread over the cache's sets.
constexpr int64_t kTilePadding = 16;

struct Block {
  Matrix hidden, input_grad;
  Tensor labels, weight, loss, logits, tile, largest;
  CrossEntropyState state;
};

Block BlockOf(const OutputHeadScratch& scratch, const Tensor& hidden, int64_t first, int64_t count) {
  Block block;
  block.hidden = RowsOf(AsMatrix(hidden), first, count);
  block.input_grad = RowsOf(AsMatrix(scratch.input_grad), first, count);
  block.labels = scratch.labels.Rows(first, count);
  block.weight = scratch.weight.Rows(first, count);
  block.loss = scratch.loss.Rows(first, count);
  block.logits = scratch.logits.Rows(0, count);
  if (!scratch.tile.empty()) block.tile = scratch.tile.Rows(0, count);
  if (!scratch.largest.empty()) block.largest = scratch.largest.Rows(0, count);
  block.state = {scratch.state.maximum.Rows(0, count), scratch.state.sum.Rows(0, count), scratch.state.predicted.Rows(0, count)};
  return block;
}

int64_t TokenBlockOf(const Step& step) {
  const int64_t tokens = step.seq_length * step.micro_batch_size;
  if (step.context.device == DeviceType::kCpu) return std::min(tokens, kTokenBlock);
  const int64_t row = step.config->padded_vocab_size * static_cast<int64_t>(SizeOf(step.storage));
  return std::min(tokens, std::max<int64_t>(kGpuLogitBytes / row / 1024, 1) * 1024);
}

int64_t TileColumnsOf(const Step& step) {
  const int64_t vocabulary = step.config->padded_vocab_size;
  return step.context.device == DeviceType::kCpu ? std::min(kTileColumns, vocabulary) : vocabulary;
}

// The loss and its gradient without tiles: one rank, all columns at once, no transform of the logits.
bool IsPlain(const Step& step) {
  return step.context.device != DeviceType::kCpu && step.tensor_parallel.size() == 1 && LogitTransformOf(*step.config).identity();
}

// The state over the whole vocabulary from the states of the ranks' parts.
void JoinRanks(const Step& step, const Block& block) {
  Communicator* group = step.tensor_parallel.group;
  Convert(step.context, block.state.maximum, DType::kF32, block.largest);
  group->AllReduce(block.largest, ReduceOp::kMax);
  CrossEntropyRescale(step.context, block.state, block.largest);
  group->AllReduce(block.state.sum, ReduceOp::kSum);
  group->AllReduce(block.state.predicted, ReduceOp::kSum);
}

DType GradientPrecision(const Step& step) { return step.config->cross_entropy_loss_fusion ? DType::kBF16 : step.precision; }

void RunPlain(const Step& step, const Block& block, const Matrix& table, const Matrix& table_grad, bool accumulate) {
  const Context& context = step.context;
  const Matrix logits = AsMatrix(block.logits);
  Gemm(context, block.hidden, table, logits, {.transpose_b = true});
  SoftmaxCrossEntropy(context, block.logits, block.labels, step.training() ? block.weight : Tensor(), GradientPrecision(step),
                      block.loss);
  if (!step.training()) return;
  Gemm(context, logits, table, block.input_grad, {});
  Gemm(context, logits, block.hidden, table_grad, {.transpose_a = true, .accumulate = accumulate});
}

void RunTiles(const Step& step, const Block& block, const Matrix& table, const Matrix& table_grad, bool accumulate) {
  const Context& context = step.context;
  const LogitTransform transform = LogitTransformOf(*step.config);
  const int64_t vocabulary = table.rows, columns = TileColumnsOf(step);
  const auto for_each_tile = [&](auto&& body) {
    for (int64_t begin = 0; begin < vocabulary; begin += columns) {
      const int64_t count = std::min(columns, vocabulary - begin);
      body(begin, count, ColumnsOf(AsMatrix(block.tile), 0, count), RowsOf(table, begin, count));
    }
  };
  CrossEntropyBegin(context, block.state);
  for_each_tile([&](int64_t begin, int64_t count, const Matrix& tile, const Matrix& words) {
    Gemm(context, block.hidden, words, tile, {.transpose_b = true});
    if (!transform.identity()) TransformLogits(context, tile, transform, step.precision);
    CrossEntropyFold(context, block.tile, begin, count, block.labels, step.precision, block.state,
                     step.training() ? block.logits : Tensor());
  });
  if (step.tensor_parallel.size() > 1) JoinRanks(step, block);
  CrossEntropyLoss(context, block.state, block.loss);
  if (!step.training()) return;
  for_each_tile([&](int64_t begin, int64_t count, const Matrix& tile, const Matrix& words) {
    CrossEntropyGradient(context, block.logits, begin, count, block.labels, block.weight, block.state, GradientPrecision(step),
                         block.tile);
    if (!transform.identity()) {
      TransformLogitsBackward(context, ColumnsOf(AsMatrix(block.logits), begin, count), transform, GradientPrecision(step), tile);
    }
    Gemm(context, tile, words, block.input_grad, {.accumulate = begin > 0});
    Gemm(context, tile, block.hidden, RowsOf(table_grad, begin, count), {.transpose_a = true, .accumulate = accumulate});
  });
}

}  // namespace

LogitTransform LogitTransformOf(const GptConfig& config) {
  return {.scale = static_cast<float>(1.0 / config.logits_scaling),
          .soft_cap = static_cast<float>(config.final_logit_softcapping)};
}

OutputHeadScratch OutputHeadScratch::Allocate(Arena* arena, const Step& step) {
  const GptConfig& c = *step.config;
  const int64_t tokens = step.seq_length * step.micro_batch_size, block = TokenBlockOf(step);
  const auto floats = [arena](const Shape& shape) { return arena->Allocate(DType::kF32, shape); };
  OutputHeadScratch scratch;
  scratch.state = {floats({block}), floats({block}), floats({block})};
  if (step.tensor_parallel.size() > 1) scratch.largest = floats({block});
  if (!IsPlain(step)) scratch.tile = arena->Allocate(step.storage, {block, TileColumnsOf(step) + kTilePadding});
  scratch.logits = arena->Allocate(step.precision, {block, c.padded_vocab_size});
  scratch.input_grad =
      arena->Allocate(step.context.device == DeviceType::kCpu ? DType::kF32 : step.storage, {tokens, c.hidden_size});
  if (!step.fuse_gradients()) scratch.weight_grad = floats({c.padded_vocab_size, c.hidden_size});
  scratch.labels = arena->Allocate(DType::kI32, {tokens});
  scratch.weight = floats({tokens});
  scratch.loss = floats({tokens});
  return scratch;
}

void OutputHeadRun(const Step& step, const Tensor& hidden, const Tensor& table, const Tensor& table_grad,
                   const OutputHeadScratch& scratch) {
  const int64_t tokens = step.seq_length * step.micro_batch_size, size = TokenBlockOf(step);
  for (int64_t first = 0; first < tokens; first += size) {
    const Block block = BlockOf(scratch, hidden, first, std::min(size, tokens - first));
    const bool accumulate = step.fuse_gradients() || first > 0;
    if (IsPlain(step)) {
      RunPlain(step, block, AsMatrix(table), AsMatrix(table_grad), accumulate);
    } else {
      RunTiles(step, block, AsMatrix(table), AsMatrix(table_grad), accumulate);
    }
  }
}

}  // namespace mbridge
