#include "engine/data/gpt_data_builder.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "engine/data/data_status.h"
#include "engine/data/index_cache.h"
#include "engine/data/mock_corpus.h"

namespace mbridge {
namespace {

constexpr const char* kDefaultTokenizerClass = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText";

int64_t SplitTokens(const TokenSource& source, const SequenceRange& range) {
  int64_t tokens = 0;
  for (int64_t i = range.begin; i < range.end; ++i) tokens += source.length(i);
  return tokens;
}

}  // namespace

absl::Status GptDataBuilder::CheckSettings() const {
  std::vector<FieldViolation> bad;
  const auto require = [&](bool ok, const char* field, std::string description) {
    if (!ok) bad.push_back({field, std::move(description)});
  };
  const GptDataConfig& c = config_;
  require(c.sequence_length > 0 && c.sequence_length < INT32_MAX, "dataset.sequence_length",
          fmt::format("{}: must be 1 or more tokens", c.sequence_length));
  require(c.seed >= 0 && c.seed < (int64_t{1} << 32), "dataset.random_seed",
          fmt::format("{}: must lie in 0 to 4294967295", c.seed));
  require(c.vocab_size > 1 && c.vocab_size <= INT32_MAX, "tokenizer.vocab_size",
          fmt::format("{}: must lie in 2 to 2147483647", c.vocab_size));
  require(c.eod_id >= -1 && c.eod_id < c.vocab_size, "tokenizer",
          fmt::format("end-of-document id {}: must lie below the vocabulary size {}", c.eod_id, c.vocab_size));
  require(c.pad_id >= -1 && c.pad_id < c.vocab_size, "tokenizer",
          fmt::format("pad id {}: must lie below the vocabulary size {}, or be -1 for none", c.pad_id, c.vocab_size));
  for (Split split : kSplits) {
    require(SamplesOf(split) >= kOneEpoch, "train",
            fmt::format("{} {} samples: must be 0 or more, or -1 for one epoch", SamplesOf(split), NameOf(split)));
  }
  require(c.mid_level_dataset_surplus >= 0 && c.mid_level_dataset_surplus <= 1000, "dataset.mid_level_dataset_surplus",
          fmt::format("{}: must lie in 0 to 1000", c.mid_level_dataset_surplus));
  const bool lists = !c.train_data_path.empty() || !c.valid_data_path.empty() || !c.test_data_path.empty();
  const int sources = (c.mock ? 1 : 0) + (c.data_path.empty() ? 0 : 1) + (lists ? 1 : 0);
  require(sources == 1, "dataset.data_path",
          sources == 0 ? "no data: give data_path, per-split paths, or ask for mock data"
                       : "more than one of mock data, data_path and per-split paths; give one");
  require(!lists || c.split.empty(), "dataset.split",
          fmt::format("'{}': per-split paths use whole corpora; leave split out", c.split));
  return bad.empty() ? absl::OkStatus() : InvalidFields(v1::REASON_INVALID_CONFIG, bad);
}

absl::Status GptDataBuilder::ReadLists() {
  const GptDataConfig& c = config_;
  per_split_ = !c.mock && c.data_path.empty();
  if (per_split_) {
    const std::vector<std::string>* lists[] = {&c.train_data_path, &c.valid_data_path, &c.test_data_path};
    for (Split split : kSplits) {
      const int i = static_cast<int>(split);
      if (lists[i]->empty()) continue;
      matrix_[i] = {0.0, 1.0};
      MB_ASSIGN_OR_RETURN(lists_[i], ParseBlendList(KeyOf(split), *lists[i]));
      if (lists_[i].prefixes.size() == 1) lists_[i].weights.reset();  // Here Megatron-LM ignores a single weight.
    }
    return absl::OkStatus();
  }
  if (config_.split.empty()) config_.split = c.mock ? "1,1,1" : "969, 30, 1";
  MB_ASSIGN_OR_RETURN(matrix_, ParseSplit(config_.split));
  if (c.mock) return absl::OkStatus();
  MB_ASSIGN_OR_RETURN(lists_[0], ParseBlendList(KeyOf(Split::kTrain), c.data_path));
  lists_[1] = lists_[2] = lists_[0];
  return absl::OkStatus();
}

absl::Status GptDataBuilder::Open() {
  MB_RETURN_IF_ERROR(CheckSettings());
  MB_RETURN_IF_ERROR(ReadLists());
  if (config_.eod_id < 0) config_.eod_id = config_.vocab_size - 1;
  if (config_.pad_id == config_.eod_id && !config_.allow_ambiguous_pad_tokens) config_.pad_id = -1;
  if (config_.tokenizer_identifiers.empty()) {
    config_.tokenizer_identifiers = {{"class", kDefaultTokenizerClass},
                                     {"tokenizer_path", std::nullopt},
                                     {"vocab_size", fmt::format("{}", config_.vocab_size)}};
  }
  if (config_.mock) mock_ = std::make_shared<MockCorpus>(config_.vocab_size, config_.eod_id);
  for (const BlendList& list : lists_) {
    for (const std::string& prefix : list.prefixes) {
      if (corpora_.contains(prefix)) continue;
      MB_ASSIGN_OR_RETURN(corpora_[prefix], IndexedDataset::Open(prefix));
    }
  }
  return absl::OkStatus();
}

int64_t GptDataBuilder::SamplesOf(Split split) const {
  const int64_t samples[] = {config_.train_samples, config_.valid_samples, config_.test_samples};
  return samples[static_cast<int>(split)];
}

std::string GptDataBuilder::KeyOf(Split split) const {
  if (!per_split_) return "dataset.data_path";
  return fmt::format("dataset.{}_data_path", NameOf(split));
}

std::shared_ptr<const TokenSource> GptDataBuilder::SourceOf(const std::string& prefix) const {
  return config_.mock ? mock_ : corpora_.at(prefix);
}

SequenceRange GptDataBuilder::SequencesOf(Split split, const TokenSource& source) const {
  if (per_split_) return {0, source.sequences()};
  return RangeOf(*matrix_[static_cast<int>(split)], source.sequences());
}

GptIndexOptions GptDataBuilder::IndexOptions(Split split, const TokenSource& source, int64_t samples) const {
  return {.sequences = SequencesOf(split, source),
          .sequence_length = config_.sequence_length,
          .samples = samples,
          .seed = config_.seed,
          .extra_token = config_.add_extra_token_to_sequence,
          .drop_last_partial = split != Split::kValid || config_.drop_last_partial_validation_sequence};
}

SampleOptions GptDataBuilder::SampleSettings() const {
  return {.vocab_size = config_.vocab_size,
          .eod_id = static_cast<int32_t>(config_.eod_id),
          .pad_id = static_cast<int32_t>(config_.pad_id),
          .eod_mask_loss = config_.eod_mask_loss,
          .reset_position_ids = config_.reset_position_ids,
          .reset_attention_mask = config_.reset_attention_mask,
          .inter_document_masking = config_.inter_document_masking,
          .first_sample_loss_mask = config_.first_sample_loss_mask};
}

absl::StatusOr<std::unique_ptr<Dataset>> GptDataBuilder::Build(Split split) {
  const auto& fractions = matrix_[static_cast<int>(split)];
  const int64_t samples = SamplesOf(split);
  if (!fractions) {
    if (split == Split::kTrain && samples != 0) {
      return InvalidDataSetting(per_split_ ? KeyOf(split) : "dataset.split",
                                fmt::format("'{}' leaves nothing for training, but {} samples are asked for",
                                            per_split_ ? "" : config_.split, samples));
    }
    return std::unique_ptr<Dataset>();
  }
  const BlendList& list = lists_[static_cast<int>(split)];
  const std::vector<std::string> prefixes = config_.mock ? std::vector<std::string>{""} : list.prefixes;
  // Megatron-LM's builder never returns for an empty range.
  for (const std::string& prefix : prefixes) {
    const TokenSource& source = *SourceOf(prefix);
    const SequenceRange range = SequencesOf(split, source);
    if (range.end > range.begin) continue;
    if (samples == 0) return std::unique_ptr<Dataset>();
    if (per_split_) return InvalidDataSetting(KeyOf(split), fmt::format("{} holds no documents", source.name()));
    return InvalidDataSetting(
        "dataset.split", fmt::format("'{}' leaves the {} split of {} without documents: it has {}, range [{}, {}); this split "
                                     "needs at least {} documents, or a larger share for {}, or a share of 0 to do without it",
                                     config_.split, NameOf(split), source.name(), source.sequences(), range.begin, range.end,
                                     SequencesNeeded(*fractions), NameOf(split)));
  }
  std::unique_ptr<Dataset> dataset;
  if (prefixes.size() == 1 && !list.weights) {
    MB_ASSIGN_OR_RETURN(dataset, BuildPart(split, prefixes[0], samples));
  } else {
    MB_ASSIGN_OR_RETURN(dataset, BuildBlend(split, list));
  }
  MB_RETURN_IF_ERROR(CheckSize(split, *dataset));
  return dataset;
}

absl::StatusOr<std::unique_ptr<GptDataset>> GptDataBuilder::BuildPart(Split split, const std::string& prefix, int64_t samples) {
  const auto source = SourceOf(prefix);
  const GptIndexOptions options = IndexOptions(split, *source, samples);
  const std::string what = fmt::format("the {} split of {}", NameOf(split), source->name());
  MB_ASSIGN_OR_RETURN(const GptIndexPlan plan, PlanGptIndex(what, SplitTokens(*source, options.sequences), options));
  if (plan.samples == 0 && samples != 0) {
    return InvalidDataSetting("dataset.sequence_length", fmt::format("{}: {} has only {} tokens, less than one sample",
                                                                     config_.sequence_length, what, plan.tokens_per_epoch));
  }
  const auto make = [&](GptIndex index) {
    return std::make_unique<GptDataset>(source, options, plan, std::move(index), SampleSettings());
  };
  if (config_.mock) return make(BuildGptIndex(*source, options, plan));
  const std::string folder = config_.cache_path.empty() ? prefix + "/cache/GPTDataset_indices" : config_.cache_path;
  const IndexCacheKey key(folder, "GPTDataset", split, PythonJson(Describe(split, prefix, samples)),
                          Fingerprint(split, {prefix}));
  if (config_.read_cache) {
    if (auto index = LoadGptIndex(key, *source, options, plan)) return make(*std::move(index));
  }
  GptIndex index = BuildGptIndex(*source, options, plan);
  // A read-only or full disk costs the next start some time, nothing else.
  if (config_.write_cache) SaveGptIndex(key, index).IgnoreError();
  return make(std::move(index));
}

absl::StatusOr<std::unique_ptr<Dataset>> GptDataBuilder::BuildBlend(Split split, const BlendList& list) {
  const int64_t requested = SamplesOf(split);
  std::vector<double> weights;
  int64_t size = 0;
  if (list.weights) {
    if (requested == kOneEpoch) {
      return InvalidDataSetting(KeyOf(split),
                                fmt::format("weights need a number of {} samples; leave the weights out to use each "
                                            "corpus once",
                                            NameOf(split)));
    }
    weights = NormalizeWeights(*list.weights);
    for (double weight : weights) size += SamplesOfPart(weight, requested, 0);
  }
  std::vector<std::unique_ptr<GptDataset>> parts;
  std::vector<int64_t> part_sizes;
  int64_t total = 0;
  for (size_t i = 0; i < list.prefixes.size(); ++i) {
    const int64_t samples = list.weights ? SamplesOfPart(weights[i], requested, config_.mid_level_dataset_surplus) : kOneEpoch;
    MB_ASSIGN_OR_RETURN(auto part, BuildPart(split, list.prefixes[i], samples));
    total += part->size();
    part_sizes.push_back(part->size());
    parts.push_back(std::move(part));
  }
  const bool exhaustive = !list.weights && requested == kOneEpoch;
  if (list.weights) {
    weights = NormalizeWeights(weights);  // Megatron-LM does so a second time, which can move a weight by one ulp.
  } else {
    weights.assign(part_sizes.begin(), part_sizes.end());
    size = exhaustive ? total : std::min(requested, total);
    if (!exhaustive) weights = NormalizeWeights(weights);
  }

  nlohmann::ordered_json description = {{"class", "BlendedDataset"}, {"datasets", nlohmann::ordered_json::array()}};
  for (size_t i = 0; i < parts.size(); ++i) {
    description["datasets"].push_back(Describe(split, list.prefixes[i], parts[i]->index_options().samples));
  }
  description["split"] = NameOf(split);
  description["weights"] = exhaustive ? nlohmann::ordered_json(part_sizes) : nlohmann::ordered_json(weights);
  description["size"] = exhaustive ? nlohmann::ordered_json() : nlohmann::ordered_json(size);
  const IndexCacheKey key(config_.cache_path, "BlendedDataset", split, PythonJson(description),
                          Fingerprint(split, list.prefixes) + nlohmann::json(part_sizes).dump());
  std::optional<BlendIndex> index;
  if (!config_.cache_path.empty() && config_.read_cache) index = LoadBlendIndex(key, size, part_sizes);
  if (!index) {
    index = exhaustive ? BuildExhaustiveBlendIndex(part_sizes) : BuildBlendIndex(weights, size);
    MB_RETURN_IF_ERROR(CheckPartSizes(split, list, parts, *index));
    if (!config_.cache_path.empty() && config_.write_cache) SaveBlendIndex(key, *index).IgnoreError();
  }
  return std::make_unique<BlendedDataset>(std::move(parts), std::move(weights), *std::move(index));
}

absl::Status GptDataBuilder::CheckPartSizes(Split split, const BlendList& list,
                                            const std::vector<std::unique_ptr<GptDataset>>& parts,
                                            const BlendIndex& index) const {
  std::vector<int64_t> counts(parts.size(), 0);
  for (int16_t part : index.dataset) ++counts[static_cast<size_t>(part)];
  for (size_t i = 0; i < parts.size(); ++i) {
    if (counts[i] <= parts[i]->size()) continue;
    return InvalidDataSetting(KeyOf(split), fmt::format("the {} blend takes {} samples of {}, which was built with {}; raise "
                                                        "dataset.mid_level_dataset_surplus ({}) two- or tenfold, or use weights "
                                                        "that are less far apart",
                                                        NameOf(split), counts[i], list.prefixes[i], parts[i]->size(),
                                                        config_.mid_level_dataset_surplus));
  }
  return absl::OkStatus();
}

absl::Status GptDataBuilder::CheckSize(Split split, const Dataset& dataset) const {
  const int64_t requested = SamplesOf(split);
  if (requested <= dataset.size() || config_.allow_fewer_samples) return absl::OkStatus();
  return InvalidDataSetting(KeyOf(split),
                            fmt::format("the {} data hold {} samples, but {} are asked for; a blend without weights uses "
                                        "each corpus once: give weights (weighted corpora repeat), or fewer iterations",
                                        NameOf(split), dataset.size(), requested));
}

nlohmann::ordered_json GptDataBuilder::Describe(Split split, const std::string& prefix, int64_t samples) const {
  nlohmann::ordered_json tokenizer = nlohmann::ordered_json::object();
  for (const auto& [key, value] : config_.tokenizer_identifiers) {
    tokenizer[key] = value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
  }
  nlohmann::ordered_json matrix, text;
  if (!per_split_) {
    text = config_.split;
    matrix = nlohmann::ordered_json::array();
    for (size_t i = 0; i < matrix_.size(); ++i) {
      if (!matrix_[i]) {
        matrix.push_back(nullptr);
      } else if (i == 0) {  // Python's sum starts from the integer 0.
        matrix.push_back({0, matrix_[i]->second});
      } else {
        matrix.push_back({matrix_[i]->first, matrix_[i]->second});
      }
    }
  }
  return {{"class", "GPTDataset"},
          {"dataset_path", prefix},
          {"num_samples", samples == kOneEpoch ? nlohmann::ordered_json() : nlohmann::ordered_json(samples)},
          {"index_split", NameOf(split)},
          {"random_seed", config_.seed},
          {"sequence_length", config_.sequence_length},
          {"split", text},
          {"split_matrix", matrix},
          {"tokenizer", tokenizer}};
}

std::string GptDataBuilder::Fingerprint(Split split, const std::vector<std::string>& prefixes) const {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const std::string& prefix : prefixes) {
    const IndexedDataset& corpus = *corpora_.at(prefix);
    files.push_back({{"prefix", prefix},
                     {"idx_bytes", corpus.index_file().size()},
                     {"idx_modified_ns", corpus.index_file().modified_ns()},
                     {"bin_bytes", corpus.token_file().size()},
                     {"bin_modified_ns", corpus.token_file().modified_ns()}});
  }
  const GptIndexOptions options = IndexOptions(split, *SourceOf(prefixes[0]), 0);
  return PythonJson(
      {{"format", 1}, {"extra_token", options.extra_token}, {"drop_last_partial", options.drop_last_partial}, {"files", files}});
}

}  // namespace mbridge
