#include "client/mbctl/dry_run.h"

#include <fmt/format.h>

#include <map>
#include <vector>

#include "client/mbctl/output.h"
#include "mbridge/v1/job.pb.h"
#include "mbridge/v1/recipe.pb.h"
#include "proto/format/memory_table.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

using recipes::FormatBytes;
using recipes::FormatCount;

std::string OriginName(v1::Origin origin) {
  std::string name = StripPrefix(v1::Origin_Name(origin), "ORIGIN_");
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

class Values {
 public:
  explicit Values(const v1::ResolvedConfig& resolved) {
    for (const v1::ResolvedValue& value : resolved.values()) values_[value.key()] = value.value();
  }
  // The text of a value; empty for an absent key and null.
  std::string Get(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() || found->second == "null" ? "" : found->second;
  }
  // First of the keys that has a value.
  std::string First(const std::vector<std::string>& keys) const {
    for (const std::string& key : keys) {
      if (std::string text = Get(key); !text.empty()) return text;
    }
    return "";
  }

 private:
  std::map<std::string, std::string> values_;
};

std::string DescribeSchedule(const v1::ResolvedConfig& resolved) {
  const Values values(resolved);
  std::string text = "schedule\n";
  const auto line = [&text](const std::string& name, const std::string& what) {
    if (!what.empty()) text += fmt::format("  {:<14} {}\n", name, what);
  };
  const std::string iterations = values.Get("train.train_iters");
  const std::string batch = values.Get("train.global_batch_size");
  const std::string length = values.First({"dataset.seq_length", "model.seq_length"});
  if (!iterations.empty() && !batch.empty() && !length.empty()) {
    const double tokens = std::stod(iterations) * std::stod(batch) * std::stod(length);
    line("iterations", fmt::format("{} x {} samples x {} tokens = {} tokens", iterations, batch, length, FormatCount(tokens)));
  }
  const std::string rate = values.Get("optimizer.lr");
  if (!rate.empty()) {
    const std::string warm_up = values.First({"scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples"});
    const std::string decay = values.First({"scheduler.lr_decay_iters", "scheduler.lr_decay_samples", "train.train_iters"});
    const std::string lowest = values.Get("optimizer.min_lr");
    line("learning rate", fmt::format("{} -> {}, {}, warm-up {}, decay {}", rate, lowest.empty() ? "0" : lowest,
                                      values.Get("scheduler.lr_decay_style"), warm_up.empty() ? "0" : warm_up, decay));
  }
  line("weight decay", values.Get("optimizer.weight_decay"));
  const std::string interval = values.Get("validation.eval_interval");
  const std::string batches = values.Get("validation.eval_iters");
  if (!batches.empty() && batches != "0") {
    line("validation", interval.empty() ? fmt::format("after training, {} batches", batches)
                                        : fmt::format("every {} iterations, {} batches", interval, batches));
  }
  const std::string save = values.Get("checkpoint.save_interval");
  line("checkpoints", save.empty() ? "" : fmt::format("every {} iterations", save));
  return text;
}

std::string DescribeMemory(const v1::ResolvedConfig& resolved) {
  const v1::MemoryEstimate& memory = resolved.per_rank();
  std::string text =
      fmt::format("memory per rank (ranks {}, data parallel {})\n", resolved.ranks(), resolved.data_parallel_size());
  const auto line = [&text](const std::string& name, const std::string& what) {
    text += fmt::format("  {:<14} {:>12}\n", name, what);
  };
  line("weights", FormatBytes(memory.weight_bytes()));
  line("gradients", FormatBytes(memory.gradient_bytes()));
  line("optimizer", FormatBytes(memory.optimizer_bytes()));
  line("activations", FormatBytes(memory.activation_bytes()));
  line("workspace", FormatBytes(memory.workspace_bytes()));
  if (memory.runtime_bytes() > 0) line("CUDA", FormatBytes(memory.runtime_bytes()));
  line("total", FormatBytes(TotalBytes(memory)));
  text += "model\n";
  line("parameters", FormatCount(static_cast<double>(memory.parameters())));
  line("FLOP per token", FormatCount(static_cast<double>(resolved.flops_per_token())));
  line("checkpoint", FormatBytes(memory.checkpoint_bytes()));
  return text;
}

}  // namespace

std::string DescribeResolved(const v1::ResolvedConfig& resolved, bool all_values) {
  std::string text = fmt::format("recipe {}   hash {}\n\n", resolved.recipe(), resolved.config_hash());
  Table table({"KEY", "VALUE", "ORIGIN", "SOURCE"});
  size_t hidden = 0;
  for (const v1::ResolvedValue& value : resolved.values()) {
    if (value.origin() == v1::ORIGIN_DEFAULT && !all_values) {
      ++hidden;
      continue;
    }
    table.Add({value.key(), value.value(), OriginName(value.origin()), value.source()});
  }
  text += table.Text();
  if (hidden > 0) text += fmt::format("({} keys stand at their default; --all lists them)\n", hidden);
  text += "\nautomatic changes\n";
  for (const v1::AutomaticChange& change : resolved.changes()) {
    text += fmt::format("  {}: {} -> {} ({})\n", change.key(), change.old_value(), change.new_value(), change.why());
  }
  if (resolved.changes().empty()) text += "  none\n";
  text += "\n" + DescribeSchedule(resolved) + "\n" + DescribeMemory(resolved);
  std::string notes, warnings;
  for (const std::string& line : resolved.warnings()) {
    const bool is_note = line.starts_with(kNotePrefix);
    (is_note ? notes : warnings) += "  " + (is_note ? line.substr(kNotePrefix.size()) : line) + "\n";
  }
  if (!notes.empty()) text += "\nnotes\n" + notes;
  if (!warnings.empty()) text += "\nwarnings\n" + warnings;
  return text;
}

recipes::ResolveRequest ToResolveRequest(const v1::JobSpec& spec) {
  recipes::ResolveRequest request;
  request.recipe = spec.recipe();
  request.config_yaml = spec.config_yaml();
  request.overrides.assign(spec.overrides().begin(), spec.overrides().end());
  request.ranks = spec.ranks();
  request.device = spec.device();
  return request;
}

absl::StatusOr<v1::ResolvedConfig> ResolveLocally(const v1::JobSpec& spec, bool as_a_job) {
  recipes::ResolveRequest request = ToResolveRequest(spec);
  request.require_trainable = as_a_job;
  auto resolved = recipes::Resolve(request);
  if (!as_a_job || ReasonOf(resolved.status()) != v1::REASON_UNSUPPORTED_MODEL) return resolved;
  const std::string refusal = "a submit is refused: " + std::string(resolved.status().message());
  request.require_trainable = false;  // As the coordinator does.
  resolved = recipes::Resolve(request);
  if (resolved.ok()) resolved->add_warnings(refusal);
  return resolved;
}

}  // namespace mbridge::mbctl
