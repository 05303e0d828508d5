// Values that follow from others, in the order of their dependence. Each function leaves a record of what it replaced
// (ConfigState::Change) and a violation where two explicit values contradict each other.
#pragma once

#include "recipes/config/config_state.h"

namespace mbridge::recipes {

// Ranks of the job and what follows: data_parallel = ranks / (TP * PP * CP).
struct Layout {
  int ranks = 1;
  int data_parallel = 1;
};

// Schema defaults of every key that works, and of those that shape the model.
void ApplyDefaults(ConfigState* state);
// mixed_precision's preset, then model, optimizer and ddp from it.
void DerivePrecision(ConfigState* state);
// Model sizes, sequence length, vocabulary, data, optimizer switches, weight decay, lengths of the schedule.
void DeriveModel(ConfigState* state);
void DeriveData(ConfigState* state);
void DeriveOptimizer(ConfigState* state);
void DeriveSchedule(ConfigState* state);

// Smallest number of ranks for the parallel sizes: the larger of TP * PP * CP and EP * ETP * PP.
int RequiredRanks(const v1::ConfigContainer& config);
// A violation of "ranks" when `ranks` (0: RequiredRanks) can't be laid out.
Layout DeriveLayout(int ranks, ConfigState* state);

}  // namespace mbridge::recipes
