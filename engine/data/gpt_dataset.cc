#include "engine/data/gpt_dataset.h"

#include <algorithm>
#include <numeric>

#include "engine/core/error.h"

namespace mbridge {

GptDataset::GptDataset(std::shared_ptr<const TokenSource> source, GptIndexOptions index_options, GptIndexPlan plan,
                       GptIndex index, SampleOptions sample_options)
    : source_(std::move(source)),
      index_options_(index_options),
      plan_(plan),
      index_(std::move(index)),
      options_(sample_options) {}

void GptDataset::Get(int64_t index, const SampleView& sample) const {
  if (index < 0 || index >= size()) ThrowEngineError("sample {} of {}: out of range 0 to {}", index, source_->name(), size() - 1);
  ReadText(index, sample);
  FillLossMask(sample);
  if (!options_.inter_document_masking) {
    FillPositions(sample);
    if (sample.cu_seqlens != nullptr) FillSegments(sample);
  }
  const int64_t length = sequence_length();
  const int32_t pad = options_.pad_id;  // The model never sees a pad: id 0, masked.
  for (int64_t i = 0; i < length; ++i) sample.tokens[i] = sample.tokens[i] == pad ? 0 : sample.tokens[i];
  for (int64_t i = 0; i < length; ++i) sample.labels[i] = sample.labels[i] == pad ? 0 : sample.labels[i];
}

void GptDataset::ReadText(int64_t index, const SampleView& sample) const {
  const int64_t length = sequence_length(), extra = index_options_.extra_token ? 1 : 0;
  const int64_t number = index_.shuffle.values[static_cast<size_t>(index)];
  const int32_t* pair = index_.sample.values.data() + 2 * number;
  const int64_t first = pair[0], last = pair[2];
  int32_t next = options_.pad_id;
  int64_t filled = 0;
  int32_t segments = 0;
  for (int64_t position = first; position <= last; ++position) {
    const int64_t sequence = index_.document.values[static_cast<size_t>(position)];
    const int64_t begin = position == first ? pair[1] : 0;
    int64_t end = source_->length(sequence);
    if (position == last) end = std::min<int64_t>(end, pair[3] + extra);
    const int64_t count = std::min(end - begin, length + extra - filled);
    if (count <= 0) continue;
    const int64_t inputs = std::min(count, length - filled);
    source_->Read(sequence, begin, inputs, sample.tokens + filled);
    if (count > inputs) source_->Read(sequence, begin + inputs, 1, &next);
    if (options_.inter_document_masking && inputs > 0) {
      if (sample.cu_seqlens != nullptr) sample.cu_seqlens[segments] = static_cast<int32_t>(filled);
      ++segments;
      // Runs to the end: the next sequence overwrites its own part, pads go on counting.
      std::iota(sample.position_ids + filled, sample.position_ids + length, 0);
    }
    filled += count;
  }
  const int64_t inputs = std::min(filled, length);
  CheckIds(index, sample.tokens, inputs);
  if (filled > length) CheckIds(index, &next, 1);
  std::fill(sample.tokens + inputs, sample.tokens + length, options_.pad_id);
  std::copy(sample.tokens + 1, sample.tokens + length, sample.labels);
  sample.labels[length - 1] = next;
  if (options_.inter_document_masking && sample.cu_seqlens != nullptr) {
    sample.cu_seqlens[segments] = static_cast<int32_t>(length);
    *sample.num_segments = segments;
  }
}

void GptDataset::CheckIds(int64_t index, const int32_t* tokens, int64_t count) const {
  if (options_.vocab_size <= 0) return;
  const uint32_t limit = static_cast<uint32_t>(std::min<int64_t>(options_.vocab_size, INT32_MAX));
  uint32_t largest = 0;  // A negative id becomes a large one.
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(tokens[i]));
  if (largest < limit) return;
  throw EngineError(v1::REASON_DATA_ERROR,
                    fmt::format("{}: sample {} holds token id {}, outside the vocabulary of {} ids; the data were made "
                                "with another tokenizer, or tokenizer.vocab_size is too small",
                                source_->name(), index, static_cast<int32_t>(largest), options_.vocab_size));
}

void GptDataset::FillLossMask(const SampleView& sample) const {
  const int64_t length = sequence_length();
  const auto mask_pads = [&](float* mask) {
    for (int64_t i = 0; i < length; ++i) mask[i] = sample.labels[i] == options_.pad_id ? 0.0f : mask[i];
  };
  const bool per_sample = options_.eod_mask_loss || options_.reset_position_ids || options_.reset_attention_mask;
  if (options_.first_sample_loss_mask && !per_sample) {
    std::call_once(template_once_, [&] {
      template_.assign(static_cast<size_t>(length), 1.0f);
      mask_pads(template_.data());
    });
    std::copy(template_.begin(), template_.end(), sample.loss_mask);
  } else {
    std::fill(sample.loss_mask, sample.loss_mask + length, 1.0f);
  }
  if (options_.eod_mask_loss) {
    for (int64_t i = 0; i < length; ++i) sample.loss_mask[i] = sample.tokens[i] == options_.eod_id ? 0.0f : 1.0f;
  }
  mask_pads(sample.loss_mask);
}

void GptDataset::FillPositions(const SampleView& sample) const {
  const int64_t length = sequence_length();
  if (!options_.reset_position_ids) {
    std::iota(sample.position_ids, sample.position_ids + length, 0);
    return;
  }
  int32_t position = 0;
  for (int64_t i = 0; i < length; ++i) {
    sample.position_ids[i] = position;
    position = sample.tokens[i] == options_.eod_id ? 0 : position + 1;
  }
}

void GptDataset::FillSegments(const SampleView& sample) const {
  const int64_t length = sequence_length();
  int32_t segments = 0;
  sample.cu_seqlens[segments++] = 0;
  if (options_.reset_attention_mask) {
    for (int64_t i = 0; i + 1 < length; ++i) {
      if (sample.tokens[i] == options_.eod_id) sample.cu_seqlens[segments++] = static_cast<int32_t>(i + 1);
    }
  }
  sample.cu_seqlens[segments] = static_cast<int32_t>(length);
  *sample.num_segments = segments;
}

}  // namespace mbridge
