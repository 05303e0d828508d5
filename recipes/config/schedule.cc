// Lengths of training and of the learning-rate schedule.
#include "recipes/config/derive.h"

namespace mbridge::recipes {
namespace {

// train.train_iters or train.train_samples; a recipe's choice gives way to the user's.
void DeriveLength(ConfigState* state) {
  const char* iters = "train.train_iters";
  const char* samples = "train.train_samples";
  const int64_t batch = state->config.train().global_batch_size();
  if (!state->Has(iters) && !state->Has(samples)) return state->Fail(iters, "is not set; give the number of iterations");
  if (!state->Has(samples) || batch < 1) return;
  const int64_t iterations = state->config.train().train_samples() / batch;
  if (iterations < 1) {
    return state->Fail(samples, "is " + state->Text(samples) + "; allowed: at least one global batch, " + std::to_string(batch));
  }
  if (!state->Has(iters)) return state->Derive(iters, Value::Int(iterations), "train.train_samples / train.global_batch_size");
  if (state->config.train().train_iters() == iterations) return;
  if (state->LevelOf(iters) > state->LevelOf(samples)) {
    state->Change(samples, Value::Null(), "train.train_iters is set");
  } else if (state->LevelOf(iters) < state->LevelOf(samples)) {
    state->Change(iters, Value::Int(iterations), "train.train_samples / train.global_batch_size");
  } else {
    state->Fail(samples, "is " + state->Text(samples) + " and train.train_iters is " + state->Text(iters) + "; set one of them");
  }
}

// With train.train_samples the schedule counts samples: what a recipe says in iterations is converted, what the user says
// in iterations contradicts.
void ConvertToSamples(const char* name, ConfigState* state) {
  const std::string in_iters = std::string("scheduler.") + name + "_iters",
                    in_samples = std::string("scheduler.") + name + "_samples";
  const Value iters = state->Get(in_iters);
  if (iters.is_null() || iters.integer == 0 || state->LevelOf(in_iters) <= kDefault) return;
  if (state->LevelOf(in_samples) >= state->LevelOf(in_iters) && state->LevelOf(in_samples) > kDefault) {
    return state->Change(in_iters, name == std::string("lr_warmup") ? Value::Int(0) : Value::Null(), in_samples + " is set");
  }
  if (state->SetByUser(in_iters)) {
    return state->Fail(in_iters, "is " + FormatValue(iters) +
                                     " but the training is counted in samples (train.train_samples); set " + in_samples);
  }
  const Value samples = Value::Int(iters.integer * state->config.train().global_batch_size());
  state->Change(in_samples, samples, in_iters + " * train.global_batch_size, because train.train_samples is set", kDefault);
  state->settings[in_samples].level = state->LevelOf(in_iters);
  state->Change(in_iters, name == std::string("lr_warmup") ? Value::Int(0) : Value::Null(), "train.train_samples is set");
}

void RefuseSamples(const char* name, ConfigState* state) {
  const std::string key = std::string("scheduler.") + name + "_samples";
  const Value value = state->Get(key);
  if (value.is_null() || value.integer == 0) return;
  state->Fail(key, "is " + FormatValue(value) + " but the training is counted in iterations; set scheduler." + name +
                       "_iters, or train.train_samples");
}

void DeriveWarmupFraction(const std::string& counted, ConfigState* state) {
  const char* fraction = "scheduler.lr_warmup_fraction";
  if (!state->Has(fraction)) return;
  const std::string counter = "scheduler.lr_warmup_" + counted;
  if (state->Get(counter).integer == 0) return;
  if (state->LevelOf(counter) < state->LevelOf(fraction)) {
    state->Change(counter, Value::Int(0), std::string(fraction) + " is set");
  } else if (state->LevelOf(counter) > state->LevelOf(fraction)) {
    state->Change(fraction, Value::Null(), counter + " is set");
  } else {
    state->Fail(fraction, "and " + counter + " are both set; set one of them");
  }
}

}  // namespace

void DeriveSchedule(ConfigState* state) {
  DeriveLength(state);
  const bool in_samples = state->Has("train.train_samples");
  const std::string counted = in_samples ? "samples" : "iters";
  for (const char* name : {"lr_decay", "lr_warmup", "lr_wsd_decay"}) {
    if (in_samples) {
      ConvertToSamples(name, state);
    } else {
      RefuseSamples(name, state);
    }
  }
  const std::string decay = "scheduler.lr_decay_" + counted;
  const std::string length = "train.train_" + counted;
  if (!state->Has(decay)) {
    const bool by_steps = !in_samples && state->Has("scheduler.max_steps");
    const std::string from = by_steps ? "scheduler.max_steps" : length;
    if (state->Has(from)) state->Derive(decay, state->Get(from), from);
  }
  const std::string wsd = "scheduler.lr_wsd_decay_" + counted;
  if (state->config.scheduler().lr_decay_style() == "WSD" && !state->Has(wsd)) state->Derive(wsd, state->Get(decay), decay);
  DeriveWarmupFraction(counted, state);
}

}  // namespace mbridge::recipes
