// Facts about a data set, and its full verification: what `mbctl data inspect` shows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/indexed_dataset.h"

namespace mbridge {

struct DataFacts {
  std::string prefix;
  TokenType type = TokenType::kInt32;
  int64_t sequences = 0, documents = 0, tokens = 0;
  int64_t empty_sequences = 0;
  int64_t shortest = 0, longest = 0;  // Sequence lengths in tokens.
  int64_t idx_bytes = 0, bin_bytes = 0;
  int64_t expected_bin_bytes = 0;  // tokens times the size of one.
  bool ids_scanned = false;
  int64_t min_id = 0, max_id = 0;  // Where ids_scanned and tokens > 0.
};

// Opens (and so checks) a set; with scan_ids reads every token once. Errors as IndexedDataset::Open.
absl::StatusOr<DataFacts> InspectData(const std::string& prefix, bool scan_ids);

// Everything that can be checked: headers, bounds, sequences back to back, exact .bin size, and with vocab_size > 0 every id.
// DATA_LOSS for damaged files, OUT_OF_RANGE for an id outside [0, vocab_size), naming its sequence.
absl::Status VerifyData(const std::string& prefix, int64_t vocab_size);

// One "name: value" line a fact.
std::vector<std::string> FactLines(const DataFacts& facts);

}  // namespace mbridge
