// The training loop of one rank.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "engine/data/gpt_data.h"
#include "engine/train/event_sink.h"
#include "engine/train/interval.h"
#include "engine/train/loss_totals.h"
#include "engine/train/train_state.h"
#include "engine/train/training_plan.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge {

// Constructed and run by the thread that owns the communicator. `plan`, `identity`, `world`, `sink` and `stop` outlive it.
class Trainer {
 public:
  // Builds datasets, model and state; loads the checkpoint where there is one. Throws EngineError.
  // `context` says where (DeviceOf(plan.device).MakeContext).
  // `sink` receives events on rank 0 and may be null elsewhere. `stop` is set by SIGTERM.
  Trainer(const TrainingPlan& plan, const Context& context, const RunIdentity& identity, Communicator* world, EventSink* sink,
          const std::atomic<bool>* stop);

  // Trains to the last iteration, saves, evaluates. CANCELLED_BY_USER when it was stopped before the end of that (a checkpoint is
  // written first); a resumed run does the rest, which may be the last evaluation alone.
  // Throws EngineError with the reason of any other end.
  v1::RankResult Run();

 private:
  // Datasets, weights, where to go on.
  void Prepare();
  bool is_root() const { return world_->rank() == 0; }
  // False, batch untouched: the data are at their end.
  static bool Read(MicrobatchLoader* loader, Batch* batch);
  IterationResult TrainIteration();
  // Throws NAN_LOSS where the plan says that such an iteration ends the run.
  void CheckFinite(const IterationResult& result);
  void ReportInterval();
  // Says once that what the plan wants replayed is recorded.
  void ReportGraph();
  // These end early, with false and nothing changed, where a stop was requested.
  bool Evaluate(const Dataset* dataset, int64_t* consumed, v1::MetricKind kind, bool final_pass);
  bool EvaluateInTraining();
  bool EvaluateAfterTraining();
  // Of any rank: all ranks get the same answer.
  bool StopRequested() const;
  bool EvaluatesAfterTraining() const;
  v1::RankResult Stopped();
  void Save();
  bool TimeIsUp() const;
  v1::RankResult Finish(v1::Reason reason, const std::string& detail);

  const TrainingPlan& plan_;
  const Context context_;
  const RunIdentity& identity_;
  Communicator* world_;
  EventSink* sink_;
  const std::atomic<bool>* stop_;
  ParallelGroups groups_;
  TrainState state_;
  LossTotals totals_;
  GptDatasets data_;
  std::unique_ptr<MicrobatchLoader> train_loader_;
  Batch batch_;
  std::vector<Batch> iteration_batches_;  // With a graph of whole iterations.
  bool graph_reported_ = false;
  IntervalLog interval_;
  v1::MetricPoint last_point_;
  int64_t last_saved_step_ = -1;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace mbridge
