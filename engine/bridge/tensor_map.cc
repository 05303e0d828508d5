#include "engine/bridge/tensor_map.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr const char* kExpert = "{expert}";

bool NamesExpert(const std::string& pattern) { return pattern.find(kExpert) != std::string::npos; }

absl::Status TableFault(const std::string& name, const std::string& what) {
  return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR, fmt::format("tensor map of {}: {}", name, what));
}

// A matrix of theirs: where its element (row, column) lies.
struct Placement {
  int source;
  int64_t begin;
  int64_t row_stride, column_stride;
};

// Rows of one matrix of ours, in the order of `runs`, from the concatenated rows of the parts of theirs.
absl::Status AddMatrix(const std::vector<RowRun>& runs, const std::vector<Placement>& parts,
                       const std::vector<int64_t>& part_rows, int64_t ours_begin, int64_t columns, TensorMapping* mapping) {
  for (const RowRun& run : runs) {
    size_t part = 0;
    int64_t row = run.theirs;
    while (part < parts.size() && row >= part_rows[part]) row -= part_rows[part++];
    if (part == parts.size() || row + (run.count - 1) * run.stride >= part_rows[part]) {
      return TableFault(mapping->ours, fmt::format("rows from {} on lie outside or in two tensors", run.theirs));
    }
    const Placement& from = parts[part];
    mapping->copies.push_back({.source = from.source,
                               .rows = run.count,
                               .columns = columns,
                               .ours_begin = ours_begin + run.ours * columns,
                               .ours_row = columns,
                               .their_begin = from.begin + row * from.row_stride,
                               .their_row = run.stride * from.row_stride,
                               .their_column = from.column_stride});
  }
  return absl::OkStatus();
}

// Rows of each part of theirs; where a split between parts is not told by the order it is into equal shares.
std::vector<int64_t> PartRows(const TensorRule& rule, const GptConfig& config, size_t parts, int64_t rows) {
  if (rule.part_rows != nullptr) return rule.part_rows(config);
  if (parts == 3 && rule.order == QkvRows) {
    const int64_t key_rows = rows / (config.num_attention_heads / config.num_query_groups + 2);
    return {rows - 2 * key_rows, key_rows, key_rows};
  }
  return std::vector<int64_t>(parts, rows / static_cast<int64_t>(parts));
}

std::vector<RowRun> RunsOfOrder(const TensorRule& rule, const GptConfig& config, const std::vector<int64_t>& part_rows) {
  int64_t rows = 0;
  std::vector<RowRun> runs;
  for (const int64_t part : part_rows) {
    runs.push_back({rows, rows, part});
    rows += part;
  }
  return rule.order == nullptr ? runs : rule.order(config, rows);
}

template <size_t kWidth> void CopyStrided(const StridedCopy& copy, char* to, const char* from, bool import) {
  const auto ours = [&](int64_t r) { return static_cast<size_t>(copy.ours_begin + r * copy.ours_row) * kWidth; };
  const auto theirs = [&](int64_t r) { return static_cast<size_t>(copy.their_begin + r * copy.their_row) * kWidth; };
  for (int64_t r = 0; r < copy.rows; ++r) {
    const size_t target = import ? ours(r) : theirs(r), source = import ? theirs(r) : ours(r);
    if (copy.their_column == 1) {
      std::memcpy(to + target, from + source, static_cast<size_t>(copy.columns) * kWidth);
      continue;
    }
    const size_t step = static_cast<size_t>(copy.their_column) * kWidth;
    const size_t to_step = import ? kWidth : step, from_step = import ? step : kWidth;
    for (int64_t c = 0; c < copy.columns; ++c) {
      std::memcpy(to + target + static_cast<size_t>(c) * to_step, from + source + static_cast<size_t>(c) * from_step, kWidth);
    }
  }
}

void CopyAny(const StridedCopy& copy, void* to, const void* from, size_t width, bool import) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  switch (width) {
    case 1: return CopyStrided<1>(copy, target, source, import);
    case 2: return CopyStrided<2>(copy, target, source, import);
    case 4: return CopyStrided<4>(copy, target, source, import);
    case 8: return CopyStrided<8>(copy, target, source, import);
    default: ThrowEngineError("elements of {} bytes", width);
  }
}

}  // namespace

std::vector<RowRun> QkvRows(const GptConfig& config, int64_t rows) {
  const int64_t groups = config.num_query_groups, queries = config.num_attention_heads / groups;
  const int64_t head = rows / (groups * (queries + 2));
  std::vector<RowRun> runs;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t ours = group * (queries + 2) * head, keys = groups * queries * head, values = keys + groups * head;
    runs.push_back({ours, group * queries * head, queries * head});
    runs.push_back({ours + queries * head, keys + group * head, head});
    runs.push_back({ours + (queries + 1) * head, values + group * head, head});
  }
  return runs;
}

std::vector<RowRun> InterleavedGateRows(const GptConfig&, int64_t rows) {
  return {{0, 0, rows / 2, 2}, {rows / 2, 1, rows / 2, 2}};
}

std::optional<Placeholders> MatchName(const std::string& pattern, const std::string& name) {
  Placeholders values;
  size_t at = 0;
  for (size_t i = 0; i < pattern.size();) {
    if (pattern[i] != '{') {
      if (at >= name.size() || name[at] != pattern[i]) return std::nullopt;
      ++at;
      ++i;
      continue;
    }
    const size_t end = pattern.find('}', i);
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(name.data() + at, name.data() + name.size(), value);
    if (error != std::errc() || value < 0 || name[at] == '-') return std::nullopt;
    at = static_cast<size_t>(stop - name.data());
    values[pattern.substr(i + 1, end - i - 1)] = value;
    i = end + 1;
  }
  if (at != name.size()) return std::nullopt;
  return values;
}

std::string FillName(const std::string& pattern, const Placeholders& values) {
  std::string name;
  for (size_t i = 0; i < pattern.size();) {
    if (pattern[i] != '{') {
      name += pattern[i++];
      continue;
    }
    const size_t end = pattern.find('}', i);
    name += std::to_string(values.at(pattern.substr(i + 1, end - i - 1)));
    i = end + 1;
  }
  return name;
}

absl::StatusOr<TensorMapping> MapTensor(const TensorRule& rule, const std::string& name, const Shape& shape,
                                        const GptConfig& config, const MapOptions& options) {
  std::optional<Placeholders> values = MatchName(rule.ours, name);
  if (!values) return TableFault(name, "does not fit " + rule.ours);
  const bool other_names = options.runtime && !rule.runtime.empty();
  const std::vector<std::string>& patterns = other_names ? rule.runtime : rule.theirs;
  const bool transposed = other_names ? rule.runtime_transposed : rule.transposed;
  const bool ours_names_expert = NamesExpert(rule.ours), they_name_expert = NamesExpert(patterns.front());
  const bool ours_stacked = !ours_names_expert && they_name_expert;
  const bool they_stack = ours_names_expert && !they_name_expert;
  const bool both_stack = !ours_names_expert && !they_name_expert && rule.experts_first;

  TensorMapping mapping{.ours = name, .shape = shape, .theirs = {}, .copies = {}, .whole = !they_stack};
  const int row_axis = ours_stacked || both_stack ? 1 : 0;
  if (shape.rank() <= row_axis) return TableFault(name, "has shape " + shape.ToString());
  const int64_t matrices = row_axis == 1 ? shape[0] : 1, our_rows = shape[row_axis];
  int64_t columns = 1;
  for (int axis = row_axis + 1; axis < shape.rank(); ++axis) columns *= shape[axis];
  const int64_t their_rows = rule.vocabulary ? std::min(options.vocab_size, our_rows) : our_rows;
  if (transposed && shape.rank() > row_axis + 2) return TableFault(name, "cannot be transposed");
  const bool turned = transposed && shape.rank() == row_axis + 2;  // A bias has nothing to transpose.

  const std::vector<int64_t> part_rows = PartRows(rule, config, patterns.size(), their_rows);
  const std::vector<RowRun> runs = RunsOfOrder(rule, config, part_rows);
  int64_t covered = 0;
  for (const RowRun& run : runs) covered += run.count;
  if (covered != their_rows) return TableFault(name, fmt::format("the order holds {} of {} rows", covered, their_rows));

  const auto add_source = [&](const std::string& pattern, int64_t rows, int64_t stacked) {
    TheirTensor tensor{FillName(pattern, *values), {}};
    if (stacked > 0) tensor.shape.push_back(stacked);
    tensor.shape.push_back(rows);
    for (int axis = row_axis + 1; axis < shape.rank(); ++axis) tensor.shape.push_back(shape[axis]);
    if (turned) std::swap(tensor.shape.back(), tensor.shape[tensor.shape.size() - 2]);
    mapping.theirs.push_back(std::move(tensor));
    return static_cast<int>(mapping.theirs.size()) - 1;
  };
  const int64_t stacked = they_stack ? options.experts : (both_stack ? matrices : 0);
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    if (ours_stacked) (*values)["expert"] = matrix;
    const int64_t slot = they_stack ? values->at("expert") : (both_stack ? matrix : 0);
    std::vector<Placement> parts;
    for (size_t part = 0; part < patterns.size(); ++part) {
      const int source = both_stack && matrix > 0 ? static_cast<int>(part) : add_source(patterns[part], part_rows[part], stacked);
      const int64_t begin = slot * part_rows[part] * columns;
      parts.push_back(turned ? Placement{source, begin, 1, part_rows[part]} : Placement{source, begin, columns, 1});
    }
    MB_RETURN_IF_ERROR(AddMatrix(runs, parts, part_rows, matrix * our_rows * columns, columns, &mapping));
  }
  return mapping;
}

void ImportTensor(const TensorMapping& mapping, const std::vector<const void*>& theirs, void* ours, size_t width) {
  for (const StridedCopy& copy : mapping.copies) CopyAny(copy, ours, theirs[copy.source], width, true);
}

void ExportTensor(const TensorMapping& mapping, const void* ours, const std::vector<void*>& theirs, size_t width) {
  for (const StridedCopy& copy : mapping.copies) CopyAny(copy, theirs[copy.source], ours, width, false);
}

}  // namespace mbridge
