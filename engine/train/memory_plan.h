// Bytes that a rank of a training run allocates, known before anything is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/train/training_plan.h"
#include "mbridge/v1/recipe.pb.h"
#include "proto/format/gpu_memory.h"

namespace mbridge {

// Of every rank of the plan (the fullest; they are equal but for rounding), from the same declarations as the run itself, on
// plan.device. Needs no GPU. checkpoint_bytes is not set. Throws EngineError for a model that cannot be built.
v1::MemoryEstimate PlanMemory(const TrainingPlan& plan);

// What a job of these lines in addition to its own, on that many ranks, is resolved to; an error if it would be refused at
// submit.
using LayoutResolver = std::function<absl::StatusOr<v1::ResolvedConfig>(const std::vector<std::string>& overrides, int ranks)>;

// What there is for the ranks of a job.
struct MemoryPlace {
  int64_t bytes = 0;  // A rank can have; 0: not known.
  int gpus = 0;       // That a job can get; 0: not known, or ranks on CPUs.
};

// The layouts that need at most `place.bytes` bytes a rank, found among changes of micro batch, recomputation, optimizer and
// tensor parallelism that `resolve` accepts: a line for each, with its keys and its need, and a last line on experts where there
// are. Up to five, those nearest to the configuration first, but after them those with more ranks than `place` has GPUs, which
// say so; at least one line, which says so if there is none.
std::vector<std::string> LayoutsThatFit(const v1::ResolvedConfig& resolved, const LayoutResolver& resolve, DeviceType device,
                                        const MemoryPlace& place);

// Empty if the plan needs at most `place.bytes` bytes. Else what it needs, what there is, and the layouts that fit.
std::string WhyTooLarge(const v1::ResolvedConfig& resolved, const LayoutResolver& resolve, const TrainingPlan& plan,
                        const MemoryPlace& place);

}  // namespace mbridge
