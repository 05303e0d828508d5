#include "engine/train/train_state.h"
#include "engine/core/device.h"

#include <bit>
#include <nlohmann/json.hpp>

#include "engine/core/device.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

// "step_00000010.<job>.<attempt>": a run that goes on from an earlier checkpoint passes the same steps again, in another job or
// attempt, and never writes into a folder that is there already. Without a job just "step_00000010".
std::string CheckpointPath(const RunIdentity& identity, int64_t step) {
  const std::string suffix = identity.job_id.empty() ? std::string() : fmt::format(".{}.{}", identity.job_id, identity.attempt);
  return fmt::format("{}/step_{:08d}{}", identity.checkpoint_directory, step, suffix);
}

}  // namespace

OptimizerOptions OptimizerOptionsOf(const TrainingPlan& plan) {
  OptimizerOptions options;
  options.adam = plan.adam;
  options.clip_grad = plan.clip_grad;
  options.moment_dtype = plan.moment_dtype;
  options.split_masters = plan.split_masters;
  options.loss_scaler = plan.loss_scaler;
  options.shard_over_data_parallel = plan.distributed_optimizer;
  options.count_zero_gradients = plan.log_num_zeros;
  const bool hooks = plan.graphs == GptModel::Graphs::kNone;
  options.buckets = {.elements = plan.bucket_elements,
                     .overlap_reduce = plan.overlap_grad_reduce && hooks,
                     .overlap_gather = plan.overlap_param_gather && hooks};
  return options;
}

TrainState::TrainState(const TrainingPlan& plan, const Context& context, const ParallelGroups& groups)
    : plan_(plan),
      context_(context),
      groups_(groups),
      parameters_(std::make_unique<ParameterStore>(plan.model.dtype, context.device)),
      model_(std::make_unique<GptModel>(plan.model, groups.tensor(), context)),
      rng_(plan.seed) {
  model_->DeclareParameters(parameters_.get());
  parameters_->Allocate(plan.distributed_optimizer ? Optimizer::SpareElements(groups_.data()->size()) : 0);
}

void TrainState::InitializeFresh() {
  const GptConfig& model = plan_.model;
  const int tensor_ranks = groups_.tensor()->size();
  rng_ = RngStreams(plan_.seed, 0, groups_.tensor()->rank());
  rng_.SkipJitWarmup(model.ffn_hidden_size / tensor_ranks, model.seq_length, plan_.micro_batch_size, model.hidden_size,
                     model.seq_length / (model.sequence_parallel ? tensor_ranks : 1));
  model_->InitializeWeights(parameters_.get(), &rng_);
  optimizer_ =
      std::make_unique<Optimizer>(parameters_.get(), OptimizerOptionsOf(plan_), groups_.data(), groups_.tensor(), context_);
  model_->Prepare(*parameters_, static_cast<int>(plan_.micro_batch_size));
  model_->Observe(groups_.data()->size() > 1 ? &optimizer_->exchange() : nullptr);
  const bool whole = plan_.graphs == GptModel::Graphs::kCall;
  model_->UseGraphs(plan_.graphs, static_cast<int>(plan_.microbatches), plan_.graph_warm_up * (whole ? 1 : plan_.microbatches));
}

absl::Status TrainState::Load(const RunIdentity& identity) {
  // Megatron-LM draws initial weights before it loads, so streams that the checkpoint does not set are those after the draws.
  InitializeFresh();
  LoadOptions options;
  options.expected_manifest_hash = identity.expected_manifest_hash;
  options.weights_only = identity.load_weights_only;
  MB_ASSIGN_OR_RETURN(const CheckpointMeta meta, LoadCheckpoint(identity.load_checkpoint_path, options,
                                                                Tensors(!identity.load_weights_only), groups_.world()));
  if (identity.load_weights_only) {
    optimizer_->TakeMastersFromValues();
  } else {
    MB_RETURN_IF_ERROR(RestoreState(meta));
    model_->OnStateRestored();
  }
  model_->OnWeightsChanged();
  return absl::OkStatus();
}

absl::StatusOr<SavedCheckpoint> TrainState::Save(const RunIdentity& identity) {
  CheckpointMeta meta;
  meta.step = step;
  meta.consumed_samples = consumed_train_samples;
  meta.run_name = identity.run_name;
  meta.job_id = identity.job_id;
  meta.build_id = identity.build_id;
  meta.attempt = identity.attempt;
  meta.config_text = identity.config_text;
  meta.state_json = StateJson();
  meta.has_optimizer_state = plan_.save_optimizer;
  optimizer_->exchange().FinishGather();
  DeviceOf(context_.device).Synchronize(context_);  // The update may still be under way: the copies run in another stream.
  return SaveCheckpoint(CheckpointPath(identity, step), meta, Tensors(plan_.save_optimizer), groups_.world());
}

std::vector<CheckpointTensor> TrainState::Tensors(bool with_optimizer) const {
  std::vector<CheckpointTensor> tensors;
  for (const Parameter& parameter : parameters_->parameters()) {
    const ParameterSpec& spec = parameter.spec;
    const bool write_here = groups_.data()->rank() == 0 && (spec.shard_axis >= 0 || groups_.tensor()->rank() == 0);
    AppendCheckpointTensors(spec.name, spec, parameter.value, 0, write_here, &tensors);
  }
  if (!with_optimizer) return tensors;
  const bool first_rank = groups_.world()->rank() == 0;
  for (const auto& [name, tensor] : model_->StateTensors()) {
    const std::string whole = std::string(kOptimizerStatePrefix) + name;
    tensors.push_back({whole, tensor.shape, tensor.shape, -1, 0, 0, tensor, first_rank});
  }
  for (const OptimizerStateTensor& state : optimizer_->StateTensors()) {
    AppendCheckpointTensors(state.name, *state.spec, state.tensor, state.flat_begin, state.write_here, &tensors);
  }
  return tensors;
}

std::string TrainState::StateJson() const {
  const LossScaler::State& scaler = optimizer_->loss_scaler().state();
  nlohmann::json state = {
      {"consumed_train_samples", consumed_train_samples},
      {"consumed_valid_samples", consumed_valid_samples},
      {"scheduled_samples", scheduled_samples},
      {"optimizer_steps", optimizer_->step_count()},
      {"evaluation_due", evaluation_due},
      {"interval", {std::bit_cast<uint64_t>(interval.loss_sum), interval.advanced, interval.skipped, interval.nan}},
      {"loss_scaler",
       {{"scale", scaler.scale}, {"growth_tracker", scaler.growth_tracker}, {"hysteresis_tracker", scaler.hysteresis_tracker}}},
  };
  if (plan_.save_rng) state["rng"] = rng_.Save();
  return state.dump();
}

absl::Status TrainState::RestoreState(const CheckpointMeta& meta) {
  try {
    const nlohmann::json state = nlohmann::json::parse(meta.state_json);
    step = meta.step;
    consumed_train_samples = state.at("consumed_train_samples").get<int64_t>();
    consumed_valid_samples = state.at("consumed_valid_samples").get<int64_t>();
    scheduled_samples = state.at("scheduled_samples").get<int64_t>();
    evaluation_due = state.at("evaluation_due").get<bool>();
    const nlohmann::json& sums = state.at("interval");
    interval = {std::bit_cast<double>(sums.at(0).get<uint64_t>()), sums.at(1).get<int64_t>(), sums.at(2).get<int64_t>(),
                sums.at(3).get<int64_t>()};
    const nlohmann::json& saved = state.at("loss_scaler");
    LossScaler::State scaler;
    scaler.scale = saved.at("scale").get<float>();
    scaler.growth_tracker = saved.at("growth_tracker").get<int64_t>();
    scaler.hysteresis_tracker = saved.at("hysteresis_tracker").get<int>();
    optimizer_->Restore(state.at("optimizer_steps").get<int64_t>(), scaler);
    if (state.contains("rng")) {
      // The state is rank 0's; the other ranks have drawn as often, each from its own seed.
      rng_ = RngStreams::Restore(state.at("rng").get<RngStreams::State>());
      rng_.model_parallel.seed += static_cast<uint64_t>(groups_.tensor()->rank());
    }
  } catch (const nlohmann::json::exception& error) {
    return MakeStatus(
        absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT,
        fmt::format("the training state of the checkpoint of iteration {} is damaged: {}", meta.step, error.what()));
  }
  return absl::OkStatus();
}

}  // namespace mbridge
