#include "engine/data/gpt_index.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "engine/core/numpy_random.h"
#include "engine/data/data_status.h"

namespace mbridge {

absl::StatusOr<GptIndexPlan> PlanGptIndex(const std::string& what, int64_t tokens_per_epoch, const GptIndexOptions& options) {
  const int64_t length = options.sequence_length, extra = options.extra_token ? 1 : 0;
  GptIndexPlan plan;
  plan.tokens_per_epoch = tokens_per_epoch;
  if (tokens_per_epoch <= 0) {
    return InvalidDataSetting("dataset.split", fmt::format("{} has {} documents, but no tokens", what,
                                                           options.sequences.end - options.sequences.begin));
  }
  plan.epochs = 1;
  if (options.samples > 0) {
    if (options.samples > (int64_t{1} << 62) / length) {
      return InvalidDataSetting("dataset",
                                fmt::format("{}: {} samples of {} tokens are too many", what, options.samples, length));
    }
    plan.epochs = (options.samples * length + extra + tokens_per_epoch - 1) / tokens_per_epoch;
  }
  const int64_t documents = options.sequences.end - options.sequences.begin;
  if (const int64_t most = INT32_MAX / documents; plan.epochs > most) {
    return InvalidDataSetting(
        "dataset", fmt::format("{}: {} samples are {} epochs of {} documents, which pass 2^31 - 1 document visits; at most {} "
                               "samples do not: lower train.train_iters (samples are iterations times train.global_batch_size)",
                               what, options.samples, plan.epochs, documents, (most * tokens_per_epoch - extra) / length));
  }
  const int64_t tokens = plan.epochs * tokens_per_epoch - extra;
  if (options.drop_last_partial) {
    plan.samples = tokens / length;
  } else {  // Megatron-LM divides in float32.
    plan.samples = static_cast<int64_t>(std::ceil(static_cast<float>(tokens) / static_cast<float>(length)));
  }
  if (plan.samples >= (int64_t{1} << 32) - 2) {
    return InvalidDataSetting("dataset", fmt::format("{}: {} samples; fewer than 2^32 - 2 are supported", what, plan.samples));
  }
  plan.samples_per_epoch = (tokens_per_epoch - extra) / length;
  if (plan.epochs > 1) {
    plan.samples_before_final = ((plan.epochs - 1) * tokens_per_epoch - extra) / length;
    const int64_t from_final = options.samples - plan.samples_before_final;
    plan.separate_final_epoch = from_final < static_cast<int64_t>(0.80 * static_cast<double>(plan.samples_per_epoch));
  }
  return plan;
}

std::vector<int32_t> BuildSampleIndex(const TokenSource& source, std::span<const int32_t> documents, int64_t sequence_length,
                                      int64_t samples, bool extra_token) {
  const int64_t extra = extra_token ? 1 : 0;
  std::vector<int32_t> index(static_cast<size_t>(2 * (samples + 1)));
  size_t position = 0;
  int64_t offset = 0;
  for (int64_t sample = 1; sample <= samples; ++sample) {
    // With the extra token the next sample starts on the last one of this sample.
    for (int64_t remaining = sequence_length + extra; remaining > 0;) {
      const int64_t length = source.length(documents[position]);
      const int64_t available = length - offset;
      if (available >= remaining) {
        offset += remaining - extra;
        remaining = 0;
      } else if (position + 1 == documents.size()) {  // Only the kept partial sample gets here.
        offset = std::max<int64_t>(length - extra, 0);
        remaining = 0;
      } else {
        remaining -= available;
        ++position;
        offset = 0;
      }
    }
    index[2 * sample] = static_cast<int32_t>(position);
    index[2 * sample + 1] = static_cast<int32_t>(offset);
  }
  return index;
}

namespace {

// `epochs` copies of the split's sequence numbers, shuffled together, appended to *documents.
void AppendShuffledEpochs(const SequenceRange& range, int64_t epochs, NumpyRandomState& random, std::vector<int32_t>* documents) {
  const size_t begin = documents->size();
  const size_t count = static_cast<size_t>(range.end - range.begin);
  documents->resize(begin + static_cast<size_t>(epochs) * count);
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    const auto first = documents->begin() + static_cast<std::ptrdiff_t>(begin + static_cast<size_t>(epoch) * count);
    std::iota(first, first + static_cast<std::ptrdiff_t>(count), static_cast<int32_t>(range.begin));
  }
  random.Shuffle(std::span<int32_t>(*documents).subspan(begin));
}

}  // namespace

GptIndex BuildGptIndex(const TokenSource& source, const GptIndexOptions& options, const GptIndexPlan& plan) {
  NumpyRandomState random(static_cast<uint32_t>(options.seed));
  std::vector<int32_t> documents;
  documents.reserve(static_cast<size_t>(plan.epochs * (options.sequences.end - options.sequences.begin)));
  AppendShuffledEpochs(options.sequences, plan.separate_final_epoch ? plan.epochs - 1 : plan.epochs, random, &documents);
  if (plan.separate_final_epoch) AppendShuffledEpochs(options.sequences, 1, random, &documents);

  std::vector<int32_t> samples = BuildSampleIndex(source, documents, options.sequence_length, plan.samples, options.extra_token);

  std::vector<uint32_t> shuffle(static_cast<size_t>(plan.samples));
  std::iota(shuffle.begin(), shuffle.end(), 0u);
  const std::span<uint32_t> all(shuffle);
  if (plan.separate_final_epoch) {
    random.Shuffle(all.first(static_cast<size_t>(plan.samples_before_final)));
    random.Shuffle(all.subspan(static_cast<size_t>(plan.samples_before_final)));
  } else {
    random.Shuffle(all);
  }
  return {SharedArray<int32_t>::Own(std::move(documents)), SharedArray<int32_t>::Own(std::move(samples)),
          SharedArray<uint32_t>::Own(std::move(shuffle))};
}

bool IsConsistent(const GptIndex& index, const TokenSource& source, const GptIndexOptions& options, const GptIndexPlan& plan) {
  const auto documents = index.document.values;
  const auto samples = index.sample.values;
  const auto shuffle = index.shuffle.values;
  if (static_cast<int64_t>(documents.size()) != plan.epochs * (options.sequences.end - options.sequences.begin)) return false;
  if (static_cast<int64_t>(samples.size()) != 2 * (plan.samples + 1)) return false;
  if (static_cast<int64_t>(shuffle.size()) != plan.samples) return false;
  for (int32_t document : documents) {
    if (document < options.sequences.begin || document >= options.sequences.end) return false;
  }
  int32_t position = 0, offset = 0;
  for (size_t i = 0; i < samples.size(); i += 2) {
    const int32_t next = samples[i], next_offset = samples[i + 1];
    if (next < position || (next == position && next_offset < offset)) return false;
    if (static_cast<size_t>(next) >= documents.size() || next_offset < 0) return false;
    if (next_offset > source.length(documents[static_cast<size_t>(next)])) return false;
    position = next;
    offset = next_offset;
  }
  return std::all_of(shuffle.begin(), shuffle.end(), [&](uint32_t i) { return i < static_cast<uint64_t>(plan.samples); });
}

}  // namespace mbridge
