// The GPT pretraining data of a run: train, validation and test datasets, sample for sample as Megatron-LM builds them.
//
// Sources: megatron/core/datasets/{gpt_dataset,blended_dataset,blended_megatron_dataset_builder,indexed_dataset}.py,
// helpers.cpp. Checked against recordings of the real classes (tests/data/mlm).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/data/dataset.h"
#include "engine/data/microbatch_loader.h"  // IWYU pragma: export

namespace mbridge {

// "No size": exactly one epoch.
inline constexpr int64_t kOneEpoch = -1;

struct GptDataConfig {
  // Corpus: mock (Megatron-LM's 100,000 computed documents), or data_path, or the per-split lists.
  // A list is prefixes, or weight, prefix, weight, prefix, … A prefix names <prefix>.idx and <prefix>.bin.
  bool mock = false;
  std::vector<std::string> data_path;
  std::vector<std::string> train_data_path, valid_data_path, test_data_path;  // Whole corpora, no split.
  // Relative sizes of train, validation, test; empty: "1,1,1" for mock data, "969, 30, 1" for data_path.
  std::string split;

  int64_t sequence_length = 0;  // Tokens per sample, > 0.
  int64_t seed = 1234;          // dataset.random_seed, [0, 2^32).
  int64_t vocab_size = 0;       // Ids must be below it; mock data are 1 … vocab_size - 1.
  int64_t eod_id = -1;          // -1: vocab_size - 1, as NullTokenizer.
  int64_t pad_id = -1;          // -1: none.

  // Requested samples: 0 builds one epoch but promises nothing, kOneEpoch asks for exactly one epoch.
  int64_t train_samples = 0, valid_samples = 0, test_samples = 0;

  // Index cache: empty = <prefix>/cache/GPTDataset_indices as Megatron-LM (blends and mock data are then not cached). A
  // cache is used only if our sidecar says that data files and settings are the same. It is never an error if it cannot be
  // written.
  std::string cache_path;
  bool read_cache = true;
  bool write_cache = true;  // Let one rank a node write.

  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool inter_document_masking = false;  // Segments and positions by .idx sequence instead of by eod token.
  bool add_extra_token_to_sequence = true;
  bool drop_last_partial_validation_sequence = true;
  bool allow_ambiguous_pad_tokens = false;
  double mid_level_dataset_surplus = 0.005;
  // Megatron-LM starts every loss mask from that of the first sample fetched from a corpus, its pad zeros included
  // (only without the two resets and eod_mask_loss). Reproduced where true: then the order of Get calls matters.
  bool first_sample_loss_mask = false;
  // Unweighted blends hold at most one epoch of each part; false refuses them where that is less than requested.
  bool allow_fewer_samples = false;

  // Tokenizer part of the cache description: key -> text or null. Empty: NullTokenizer's with vocab_size.
  std::vector<std::pair<std::string, std::optional<std::string>>> tokenizer_identifiers;
};

struct GptDatasets {
  std::unique_ptr<Dataset> train, valid, test;  // Null where the split is absent, or empty with 0 samples requested.
};

// Opens and checks every file, builds or loads the indices. Errors name field or file, the value and what would work:
// INVALID_ARGUMENT (settings, split without documents, weights that cannot be met), NOT_FOUND, DATA_LOSS (damaged files).
// It does not read all tokens; ids are checked as samples are fetched, and by CheckGptData.
absl::StatusOr<GptDatasets> BuildGptDatasets(const GptDataConfig& config);

// Preflight: builds everything without writing a cache and reads every token once (memory-mapped, at disk speed) to find
// ids outside [0, vocab_size). Appends one line a fact for people to *facts.
absl::Status CheckGptData(const GptDataConfig& config, std::vector<std::string>* facts);

// The corpora whose samples come in another order under `now` than under `before`, one line each: the order follows from the
// number of epochs, and so from the number of samples asked for. Corpora that only one of them has are left out.
absl::StatusOr<std::vector<std::string>> OrderChanges(const GptDataConfig& before, const GptDataConfig& now);

}  // namespace mbridge
