// What the tests of configurations share.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "proto/rpc/status_details.h"
#include "recipes/config/resolve.h"

namespace mbridge::recipes {

// The documented correlation run, line by line.
inline std::vector<std::string> CorrelationRun() {
  return {"model.num_layers=2",       "model.hidden_size=256",       "model.num_attention_heads=4", "model.ffn_hidden_size=1024",
          "model.seq_length=512",     "dataset.seq_length=512",      "train.train_iters=10",        "train.global_batch_size=32",
          "train.micro_batch_size=4", "validation.eval_interval=10", "validation.eval_iters=2",     "optimizer.lr=3e-4",
          "optimizer.min_lr=3e-5",    "scheduler.lr_warmup_iters=1", "scheduler.lr_decay_iters=10", "rng.seed=1234",
          "logger.log_interval=1"};
}

inline std::vector<std::string> With(std::vector<std::string> lines, const std::vector<std::string>& more) {
  lines.insert(lines.end(), more.begin(), more.end());
  return lines;
}

inline std::vector<std::string> Without(std::vector<std::string> lines, const std::string& key) {
  std::erase_if(lines, [&key](const std::string& line) { return line.rfind(key + "=", 0) == 0; });
  return lines;
}

inline absl::StatusOr<v1::ResolvedConfig> Submit(const std::vector<std::string>& overrides,
                                                 const std::string& recipe = "vanilla_gpt_pretrain_config", int ranks = 0) {
  ResolveRequest request;
  request.recipe = recipe;
  request.overrides = overrides;
  request.ranks = ranks;
  return Resolve(request);
}

inline absl::StatusOr<v1::ResolvedConfig> Show(const std::vector<std::string>& overrides, const std::string& recipe) {
  ResolveRequest request;
  request.recipe = recipe;
  request.overrides = overrides;
  request.require_trainable = false;
  return Resolve(request);
}

inline std::map<std::string, v1::ResolvedValue> Values(const v1::ResolvedConfig& resolved) {
  std::map<std::string, v1::ResolvedValue> values;
  for (const auto& value : resolved.values()) values[value.key()] = value;
  return values;
}

// The violation of `field`, or "" without one.
inline std::string Violation(const absl::Status& status, const std::string& field) {
  for (const FieldViolation& violation : FieldViolationsOf(status)) {
    if (violation.field == field) return violation.description;
  }
  return "";
}

}  // namespace mbridge::recipes
