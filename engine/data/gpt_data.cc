#include "engine/data/gpt_data.h"

#include <map>
#include <set>

#include <fmt/format.h>

#include "engine/data/data_status.h"
#include "engine/data/gpt_data_builder.h"

namespace mbridge {
namespace {

absl::StatusOr<GptDatasets> BuildAll(GptDataBuilder& builder) {
  GptDatasets datasets;
  MB_ASSIGN_OR_RETURN(datasets.train, builder.Build(Split::kTrain));
  MB_ASSIGN_OR_RETURN(datasets.valid, builder.Build(Split::kValid));
  MB_ASSIGN_OR_RETURN(datasets.test, builder.Build(Split::kTest));
  return datasets;
}

std::string FactOf(const GptDataset& dataset, const std::string& indent) {
  const GptIndexPlan& plan = dataset.plan();
  const SequenceRange& range = dataset.index_options().sequences;
  return fmt::format("{}{}: documents [{}, {}), {} tokens an epoch, {} epoch{}{}, {} samples", indent, dataset.source().name(),
                     range.begin, range.end, plan.tokens_per_epoch, plan.epochs, plan.epochs == 1 ? "" : "s",
                     plan.separate_final_epoch ? " (the last one in part)" : "", dataset.size());
}

void AppendFacts(const char* split, const Dataset* dataset, std::vector<std::string>* facts) {
  if (dataset == nullptr) {
    facts->push_back(fmt::format("{}: none", split));
  } else if (auto* blend = dynamic_cast<const BlendedDataset*>(dataset)) {
    facts->push_back(fmt::format("{}: {} samples of {} corpora", split, blend->size(), blend->parts().size()));
    for (const auto& part : blend->parts()) facts->push_back(FactOf(*part, "  "));
  } else if (auto* part = dynamic_cast<const GptDataset*>(dataset)) {
    facts->push_back(FactOf(*part, fmt::format("{}: ", split)));
  }
}

std::map<std::string, GptIndexPlan> PlansOf(const GptDatasets& datasets) {
  std::map<std::string, GptIndexPlan> plans;
  const auto add = [&](const char* split, const Dataset* dataset) {
    if (auto* blend = dynamic_cast<const BlendedDataset*>(dataset)) {
      for (const auto& part : blend->parts()) plans[fmt::format("{}: {}", split, part->source().name())] = part->plan();
    } else if (auto* part = dynamic_cast<const GptDataset*>(dataset)) {
      plans[fmt::format("{}: {}", split, part->source().name())] = part->plan();
    }
  };
  add("train", datasets.train.get());
  add("validation", datasets.valid.get());
  return plans;
}

}  // namespace

absl::StatusOr<GptDatasets> BuildGptDatasets(const GptDataConfig& config) {
  GptDataBuilder builder(config);
  MB_RETURN_IF_ERROR(builder.Open());
  return BuildAll(builder);
}

absl::Status CheckGptData(const GptDataConfig& config, std::vector<std::string>* facts) {
  GptDataConfig preflight = config;
  preflight.write_cache = false;
  GptDataBuilder builder(preflight);
  MB_RETURN_IF_ERROR(builder.Open());
  for (const auto& [prefix, corpus] : builder.corpora()) {
    facts->push_back(fmt::format("{}: {} documents, {} sequences, {} tokens of {}", prefix, corpus->documents(),
                                 corpus->sequences(), corpus->tokens(), NameOf(corpus->type())));
  }
  MB_ASSIGN_OR_RETURN(const GptDatasets datasets, BuildAll(builder));
  AppendFacts("train", datasets.train.get(), facts);
  AppendFacts("validation", datasets.valid.get(), facts);
  AppendFacts("test", datasets.test.get(), facts);
  for (const auto& [prefix, corpus] : builder.corpora()) {
    int64_t id = 0;
    const int64_t sequence = corpus->FindBadId(config.vocab_size, &id);
    if (sequence < 0) continue;
    return InvalidDataSetting(
        "tokenizer.vocab_size",
        fmt::format("{}: {}.bin holds token id {} in sequence {}, ids must lie in 0 to {}; the data were made "
                    "with another tokenizer",
                    config.vocab_size, prefix, id, sequence, config.vocab_size - 1));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> OrderChanges(const GptDataConfig& before, const GptDataConfig& now) {
  std::vector<std::string> changes;
  if (before.train_samples == now.train_samples && before.valid_samples == now.valid_samples) return changes;
  std::map<std::string, GptIndexPlan> plans[2];
  for (const int which : {0, 1}) {
    GptDataConfig config = which == 0 ? before : now;
    config.write_cache = false;
    MB_ASSIGN_OR_RETURN(const GptDatasets datasets, BuildGptDatasets(config));
    plans[which] = PlansOf(datasets);
  }
  for (const auto& [name, plan] : plans[1]) {
    const auto old = plans[0].find(name);
    if (old == plans[0].end()) continue;
    if (old->second.epochs == plan.epochs && old->second.separate_final_epoch == plan.separate_final_epoch) continue;
    const auto text = [](const GptIndexPlan& p) {
      return fmt::format("{} epoch{}{}", p.epochs, p.epochs == 1 ? "" : "s",
                         p.separate_final_epoch ? ", the last one in part" : "");
    };
    changes.push_back(fmt::format("{}: {} instead of {}", name, text(plan), text(old->second)));
  }
  return changes;
}

}  // namespace mbridge
