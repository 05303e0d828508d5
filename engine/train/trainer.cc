#include "engine/train/trainer.h"

#include <google/protobuf/util/time_util.h>

#include <cmath>
#include <limits>

#include "engine/core/device.h"
#include "engine/core/failpoint.h"
#include "engine/core/watchdog.h"
#include "engine/train/memory_plan.h"
#include "engine/train/precision_parts.h"
#include "engine/train/throw_status.h"

namespace mbridge {
namespace {

HostMicrobatch ViewOf(const Batch& batch) {
  return {batch.tokens.data(), batch.labels.data(), batch.loss_mask.data(), batch.position_ids.data()};
}

}  // namespace

Trainer::Trainer(const TrainingPlan& plan, const Context& context, const RunIdentity& identity, Communicator* world,
                 EventSink* sink, const std::atomic<bool>* stop)
    : plan_(plan),
      context_(context),
      identity_(identity),
      world_(world),
      sink_(sink),
      stop_(stop),
      groups_(plan.parallel, world),
      state_(plan, context, groups_),
      totals_(context, world),
      batch_(static_cast<int>(plan.micro_batch_size), plan.model.seq_length),
      interval_(&plan, &state_.interval),
      begin_(std::chrono::steady_clock::now()) {
  NotingFaults([this] { Prepare(); });  // Here: the members' unwinding may hang.
}

void Trainer::Prepare() {
  if (plan_.graphs == GptModel::Graphs::kCall) iteration_batches_.assign(static_cast<size_t>(plan_.microbatches), batch_);
  GptDataConfig data = plan_.data;
  data.write_cache = is_root();
  data_ = ValueOrThrow(BuildGptDatasets(data));
  if (identity_.load_checkpoint_path.empty()) {
    state_.InitializeFresh();
  } else {
    ThrowIfError(state_.Load(identity_));
    if (!identity_.load_weights_only) last_saved_step_ = state_.step;
  }
  train_loader_ = std::make_unique<MicrobatchLoader>(data_.train.get(), state_.consumed_train_samples,
                                                     static_cast<int>(plan_.micro_batch_size), groups_.data()->rank(),
                                                     groups_.data()->size());
}

v1::RankResult Trainer::Run() {
  if (is_root()) {
    v1::RankStarted started;
    started.set_first_step(state_.step);
    started.set_parameters(state_.parameters().NumGlobalElements());
    started.set_consumed_samples(state_.consumed_train_samples);
    *started.mutable_memory() = PlanMemory(plan_);
    sink_->Started(started);
  }
  const std::string precision = DescribeLowPrecision(plan_.model, state_.model().HasNarrowProducts());
  if (is_root() && !precision.empty()) sink_->Message(precision);
  if (is_root() && plan_.graphs != GptModel::Graphs::kNone && plan_.device == DeviceType::kCpu)
    sink_->Message("model.cuda_graph_impl has no effect on CPUs: graphs are recorded on GPUs");
  std::string exchange = state_.optimizer().exchange().Describe();
  if (plan_.graphs != GptModel::Graphs::kNone && (plan_.overlap_grad_reduce || plan_.overlap_param_gather) && !exchange.empty())
    exchange += ": nothing overlaps with model.cuda_graph_impl";
  if (is_root() && !exchange.empty()) sink_->Message(exchange);
  const std::string warning = state_.optimizer().exchange().Warning();
  if (is_root() && !warning.empty()) sink_->Message(warning);
  if (state_.evaluation_due && !EvaluateInTraining()) return Stopped();
  interval_.Restart();
  while (state_.step < plan_.train_iters) {
    MB_FAILPOINT("train.iteration");
    const IterationResult result = TrainIteration();
    ReportGraph();
    interval_.Add(result);
    CheckFinite(result);
    if (state_.step % plan_.log_interval == 0 || state_.step == 1) ReportInterval();
    state_.evaluation_due = plan_.eval_interval > 0 && plan_.eval_iters > 0 && state_.step % plan_.eval_interval == 0;
    if (result.stop_requested || (state_.evaluation_due && !EvaluateInTraining())) return Stopped();
    if (plan_.save_interval > 0 && state_.step % plan_.save_interval == 0) Save();
    if (plan_.exit_interval > 0 && state_.step % plan_.exit_interval == 0 && state_.step < plan_.train_iters) {
      Save();
      return Finish(v1::REASON_COMPLETED,
                    fmt::format("train.exit_interval: ended after iteration {} of {}", state_.step, plan_.train_iters));
    }
    if (TimeIsUp()) {
      Save();
      return Finish(v1::REASON_COMPLETED,
                    fmt::format("train.exit_duration_in_mins: ended after iteration {} of {}", state_.step, plan_.train_iters));
    }
  }
  Save();
  if (!EvaluateAfterTraining()) return Stopped();
  return Finish(v1::REASON_COMPLETED, fmt::format("finished iteration {}", state_.step));
}

// Collectives enqueued before may be done long before slow storage is: the watchdog shall not blame them.
bool Trainer::Read(MicrobatchLoader* loader, Batch* batch) {
  const ReadingNote note;
  MB_FAILPOINT("train.read");
  return loader->Next(batch);
}

IterationResult Trainer::TrainIteration() {
  state_.parameters().ZeroGradients(context_);
  const float loss_scale = state_.optimizer().loss_scaler().scale();
  const float grad_scale = loss_scale / static_cast<float>(plan_.microbatches);
  const auto next = [this](Batch* batch) {
    if (Read(train_loader_.get(), batch)) return ViewOf(*batch);
    throw EngineError(v1::REASON_DATA_ERROR, fmt::format("the training data end after {} samples", train_loader_->consumed()));
  };
  if (iteration_batches_.empty()) {
    for (int64_t i = 0; i < plan_.microbatches; ++i) {
      const HostMicrobatch batch = next(&batch_);
      if (i + 1 == plan_.microbatches) state_.optimizer().exchange().BeginLastBackward();
      state_.model().AddForwardBackward(batch, grad_scale, &state_.rng());
    }
  } else {
    std::vector<HostMicrobatch> views;
    for (Batch& batch : iteration_batches_) views.push_back(next(&batch));
    state_.model().AddForwardBackwards(views, grad_scale, &state_.rng());
  }
  totals_.Sum(&state_.model(), stop_->load());
  state_.optimizer().ReduceGradients();
  state_.model().UpdateExpertBiases(groups_.data());
  state_.model().UpdateScales(plan_.model.low_precision.maxima_over_tensor_parallel ? groups_.tensor() : world_);
  const MeasuredGradients gradients = state_.optimizer().MeasureGradients();  // The one wait, for the totals as well.

  IterationResult result;
  result.lm_loss = totals_.MeanLoss();
  result.stop_requested = totals_.StopRequested();
  const int64_t samples = state_.scheduled_samples;
  if (std::isfinite(result.lm_loss) || !plan_.check_nan_in_loss) {
    result.step = state_.optimizer().Step(gradients, LearningRate(plan_.schedule, samples), WeightDecay(plan_.schedule, samples));
  } else {
    result.step.gradient_norm = std::numeric_limits<float>::quiet_NaN();  // The run ends here.
    result.step.loss_scale = loss_scale;
  }
  if (result.step.updated) {
    state_.model().OnWeightsChanged();
    state_.scheduled_samples += plan_.global_batch_size;
  }
  state_.consumed_train_samples += plan_.global_batch_size;
  ++state_.step;
  return result;
}

void Trainer::CheckFinite(const IterationResult& result) {
  const bool bad_loss = !std::isfinite(result.lm_loss) && plan_.check_nan_in_loss;
  const bool bad_gradient = !result.step.updated && !bad_loss && !plan_.loss_scaler.dynamic && plan_.check_nan_in_grad;
  if (!bad_loss && !bad_gradient) return;
  ReportInterval();
  if (bad_loss) {
    throw EngineError(v1::REASON_NAN_LOSS, fmt::format("the lm loss of iteration {} is {}", state_.step,
                                                       std::isnan(result.lm_loss) ? "NaN" : "infinite"));
  }
  const std::string name = state_.optimizer().FindNonFiniteGradient();
  throw EngineError(v1::REASON_NAN_LOSS, fmt::format("iteration {}: the gradient{} is not finite", state_.step,
                                                     name.empty() ? std::string() : " of " + name));
}

void Trainer::ReportInterval() {
  last_point_ =
      interval_.Finish(state_.step, state_.consumed_train_samples, LearningRate(plan_.schedule, state_.scheduled_samples));
  last_point_.set_attempt(identity_.attempt);
  *last_point_.mutable_time() = google::protobuf::util::TimeUtil::GetCurrentTime();
  if (plan_.log_params_norm) last_point_.set_params_norm(state_.optimizer().ParameterNorm());  // Collective: every rank.
  if (is_root()) sink_->Metric(last_point_);
}

void Trainer::ReportGraph() {
  const int64_t nodes = state_.model().RecordedNodes();
  if (graph_reported_ || nodes == 0) return;
  graph_reported_ = true;
  const char* of = plan_.graphs == GptModel::Graphs::kCall ? "an iteration's" : "a microbatch's";
  if (is_root()) sink_->Message(fmt::format("CUDA graph of {} forward and backward: {} nodes", of, nodes));
}

bool Trainer::Evaluate(const Dataset* dataset, int64_t* consumed, v1::MetricKind kind, bool final_pass) {
  if (dataset == nullptr) return true;
  MicrobatchLoader loader(dataset, *consumed, static_cast<int>(plan_.micro_batch_size), groups_.data()->rank(),
                          groups_.data()->size());
  for (int64_t i = 0; i < plan_.eval_iters * plan_.microbatches; ++i) {
    MB_FAILPOINT("train.evaluation");
    if (i % plan_.microbatches == 0 && StopRequested()) return false;
    if (!Read(&loader, &batch_)) {
      throw EngineError(v1::REASON_DATA_ERROR, fmt::format("the evaluation data end after {} samples", loader.consumed()));
    }
    state_.model().AddEvaluation(ViewOf(batch_));
  }
  totals_.Sum(&state_.model(), false);
  DeviceOf(context_.device).Synchronize(context_);
  *consumed = loader.consumed();
  if (is_root()) {
    v1::MetricPoint point;
    point.set_kind(kind);
    point.set_attempt(identity_.attempt);
    point.set_step(state_.step);
    point.set_total_steps(plan_.train_iters);
    point.set_lm_loss(totals_.MeanLoss());
    point.set_consumed_samples(state_.consumed_train_samples);
    point.set_final_pass(final_pass);
    *point.mutable_time() = google::protobuf::util::TimeUtil::GetCurrentTime();
    sink_->Metric(point);
  }
  interval_.Restart();
  return true;
}

bool Trainer::EvaluateInTraining() {
  if (!Evaluate(data_.valid.get(), &state_.consumed_valid_samples, v1::METRIC_KIND_VALIDATION, false)) return false;
  state_.evaluation_due = false;
  return true;
}

bool Trainer::EvaluateAfterTraining() {
  if (!EvaluatesAfterTraining()) return true;
  int64_t consumed_test_samples = 0;
  return Evaluate(data_.valid.get(), &state_.consumed_valid_samples, v1::METRIC_KIND_VALIDATION, true) &&
         Evaluate(data_.test.get(), &consumed_test_samples, v1::METRIC_KIND_TEST, true);
}

bool Trainer::EvaluatesAfterTraining() const { return plan_.eval_iters > 0 && (data_.valid != nullptr || data_.test != nullptr); }

bool Trainer::StopRequested() const {
  double requested = stop_->load() ? 1 : 0;
  world_->AllReduce({&requested, DType::kF64, DeviceType::kCpu, {1}}, ReduceOp::kMax);
  return requested > 0;
}

// An evaluation that is due stays so: a stop does not wait for it, and the resumed run does it first.
v1::RankResult Trainer::Stopped() {
  Save();
  const char* left = state_.evaluation_due ? ", before its evaluation" : "";
  if (state_.step == plan_.train_iters) {
    if (!state_.evaluation_due && !EvaluatesAfterTraining())
      return Finish(v1::REASON_COMPLETED, fmt::format("finished iteration {}; the stop came after it", state_.step));
    left = ": all are trained and saved, a resume does the evaluation that is left";
  }
  return Finish(v1::REASON_CANCELLED_BY_USER,
                fmt::format("stopped after iteration {} of {}{}", state_.step, plan_.train_iters, left));
}

void Trainer::Save() {
  if (identity_.checkpoint_directory.empty() || last_saved_step_ == state_.step) return;
  const SavedCheckpoint saved = ValueOrThrow(state_.Save(identity_));
  last_saved_step_ = state_.step;
  if (is_root()) {
    v1::Checkpoint checkpoint;
    checkpoint.set_run_name(identity_.run_name);
    checkpoint.set_job_id(identity_.job_id);
    checkpoint.set_attempt(identity_.attempt);
    checkpoint.set_step(state_.step);
    checkpoint.set_path(saved.path);
    checkpoint.set_bytes(saved.bytes);
    checkpoint.set_manifest_hash(saved.manifest_hash);
    checkpoint.set_config_hash(identity_.config_hash);
    checkpoint.set_consumed_samples(state_.consumed_train_samples);
    checkpoint.set_has_optimizer_state(plan_.save_optimizer);
    *checkpoint.mutable_metrics() = last_point_;
    sink_->CheckpointWritten(checkpoint);
  }
  interval_.Restart();
}

bool Trainer::TimeIsUp() const {
  if (plan_.exit_duration_minutes <= 0) return false;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
  double up = elapsed.count() > plan_.exit_duration_minutes * 60 ? 1 : 0;
  world_->AllReduce({&up, DType::kF64, DeviceType::kCpu, {1}}, ReduceOp::kMax);
  return up > 0;
}

v1::RankResult Trainer::Finish(v1::Reason reason, const std::string& detail) {
  // What is still on its way arrives before a peer leaves.
  state_.optimizer().exchange().FinishGather();
  DeviceOf(context_.device).Synchronize(context_);
  v1::RankResult result;
  result.set_reason(reason);
  result.set_detail(detail);
  result.set_last_step(state_.step);
  return result;
}

}  // namespace mbridge
