#include "engine/data/inspect.h"

#include <algorithm>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {

absl::StatusOr<DataFacts> InspectData(const std::string& prefix, bool scan_ids) {
  MB_ASSIGN_OR_RETURN(const auto data, IndexedDataset::Open(prefix));
  DataFacts facts;
  facts.prefix = prefix;
  facts.type = data->type();
  facts.sequences = data->sequences();
  facts.documents = data->documents();
  facts.tokens = data->tokens();
  facts.shortest = facts.sequences == 0 ? 0 : INT64_MAX;
  for (int64_t i = 0; i < facts.sequences; ++i) {
    const int64_t length = data->length(i);
    facts.shortest = std::min(facts.shortest, length);
    facts.longest = std::max(facts.longest, length);
    if (length == 0) ++facts.empty_sequences;
  }
  facts.idx_bytes = data->index_file().size();
  facts.bin_bytes = data->token_file().size();
  facts.expected_bin_bytes = facts.tokens * SizeOf(facts.type);
  facts.ids_scanned = scan_ids;
  if (scan_ids && facts.tokens > 0) {
    const IdRange range = data->ScanIds(0, facts.sequences);
    facts.min_id = range.min;
    facts.max_id = range.max;
  }
  return facts;
}

absl::Status VerifyData(const std::string& prefix, int64_t vocab_size) {
  MB_ASSIGN_OR_RETURN(const auto data, IndexedDataset::Open(prefix));
  MB_RETURN_IF_ERROR(data->CheckLayout());
  if (vocab_size <= 0) return absl::OkStatus();
  int64_t id = 0;
  const int64_t sequence = data->FindBadId(vocab_size, &id);
  if (sequence < 0) return absl::OkStatus();
  return DataError(absl::StatusCode::kOutOfRange, fmt::format("{}.bin: sequence {} holds token id {}; ids must lie in 0 to {}",
                                                              prefix, sequence, id, vocab_size - 1));
}

std::vector<std::string> FactLines(const DataFacts& facts) {
  std::vector<std::string> lines = {
      fmt::format("prefix: {}", facts.prefix),
      fmt::format("token type: {}", NameOf(facts.type)),
      fmt::format("documents: {}", facts.documents),
      fmt::format("sequences: {}", facts.sequences),
      fmt::format("empty sequences: {}", facts.empty_sequences),
      fmt::format("tokens: {}", facts.tokens),
      fmt::format("sequence length: {} to {}", facts.shortest, facts.longest),
      fmt::format(".idx bytes: {}", facts.idx_bytes),
      fmt::format(".bin bytes: {} (expected {})", facts.bin_bytes, facts.expected_bin_bytes),
  };
  if (facts.ids_scanned && facts.tokens > 0) lines.push_back(fmt::format("token ids: {} to {}", facts.min_id, facts.max_id));
  return lines;
}

}  // namespace mbridge
