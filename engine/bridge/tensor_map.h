// How our parameters and the tensors of a Hugging Face checkpoint hold the same numbers: a table of names and row orders, from
// which both directions follow. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/core/parameter.h"
#include "engine/model/gpt_config.h"

namespace mbridge {

// Rows [ours, ours + count) of our tensor are rows theirs, theirs + stride, … of theirs. The whole order must be one to one.
struct RowRun {
  int64_t ours = 0;
  int64_t theirs = 0;
  int64_t count = 0;
  int64_t stride = 1;
};
// The order of `rows` rows; null: the same order.
using RowOrder = std::vector<RowRun> (*)(const GptConfig& config, int64_t rows);

// Theirs: all queries, all keys, all values. Ours, group after group: its queries, its key, its value.
std::vector<RowRun> QkvRows(const GptConfig& config, int64_t rows);
// Theirs: gate and linear half in turns. Ours: the gate half, then the linear half.
std::vector<RowRun> InterleavedGateRows(const GptConfig& config, int64_t rows);

// One line of a family's table. Rows are what leads to the outputs of a linear layer: axis 0 of our tensors.
//
// Names may hold {layer} and {expert}. Several names in `theirs`: their rows follow each other (q, k, v; gate, up). Where one
// side names the expert and the other does not, the other side's tensor has the experts as its first axis; `experts_first`: both
// tensors have.
struct TensorRule {
  std::string ours;                 // Megatron-Core's name.
  std::vector<std::string> theirs;  // In the checkpoint.
  RowOrder order = nullptr;
  bool transposed = false;  // Theirs has inputs before outputs (GPT-2's Conv1D, GPT-OSS's experts).
  bool experts_first = false;
  bool vocabulary = false;  // Rows are token ids: ours may have more, which are zero after an import and cut by an export.
  // Names in the running model of transformers, where they are others (gradients of the fixtures); `runtime_transposed` as above.
  std::vector<std::string> runtime = {};
  bool runtime_transposed = false;
  // Rows of each of `theirs`; null: equal shares, or what QkvRows tells.
  std::vector<int64_t> (*part_rows)(const GptConfig& config) = nullptr;
};

// Values of {layer} and {expert}.
using Placeholders = std::map<std::string, int64_t>;
// The values if `name` fits the pattern ("a.{layer}.b").
std::optional<Placeholders> MatchName(const std::string& pattern, const std::string& name);
// `values` must hold every placeholder of the pattern.
std::string FillName(const std::string& pattern, const Placeholders& values);

// Element (r, c), r < rows, c < columns: ours[ours_begin + r * ours_row + c] is the element their_begin + r * their_row +
// c * their_column of tensor `source`.
struct StridedCopy {
  int source = 0;
  int64_t rows = 0, columns = 0;
  int64_t ours_begin = 0, ours_row = 0;
  int64_t their_begin = 0, their_row = 0, their_column = 1;
};

struct TheirTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Where one of our tensors comes from; the copies cover it exactly once (but for padding rows of a vocabulary).
struct TensorMapping {
  std::string ours;
  Shape shape;
  std::vector<TheirTensor> theirs;
  std::vector<StridedCopy> copies;
  bool whole = true;  // False: it takes only a part of a tensor of theirs (one expert of many).
};

struct MapOptions {
  int64_t vocab_size = 0;  // Rows that their vocabulary has.
  int64_t experts = 0;     // Of a layer.
  bool runtime = false;    // To the names of the running model.
};

// The mapping of a parameter by a rule whose `ours` fits its name. INTERNAL when the table and the shape do not fit.
absl::StatusOr<TensorMapping> MapTensor(const TensorRule& rule, const std::string& name, const Shape& shape,
                                        const GptConfig& config, const MapOptions& options);

// Fills ours from theirs, or theirs from ours; `width` is the element size in bytes. Sources are in the mapping's order.
void ImportTensor(const TensorMapping& mapping, const std::vector<const void*>& theirs, void* ours, size_t width);
void ExportTensor(const TensorMapping& mapping, const void* ours, const std::vector<void*>& theirs, size_t width);

}  // namespace mbridge
