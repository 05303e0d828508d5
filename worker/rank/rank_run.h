// One rank process under an agent: `mbrank --spec FILE`.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "engine/comm/communicator.h"
#include "engine/core/op.h"
#include "engine/train/event_sink.h"
#include "engine/train/memory_plan.h"
#include "engine/train/train_state.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge {

// Set by SIGTERM: finish the iteration, save, end. Installs the handler.
const std::atomic<bool>* InstallStopHandler();

// Ends the process at once with an exit code, whatever its other threads do: std::_Exit.
using ExitProcess = std::function<void(int code)>;

// Reads the RankSpec, trains, writes rank-<r>.reason and returns the exit code. Errors go to standard error (the rank's log) too.
// A rank of several whose training thread hangs does the same from its watchdog, with `exit` in place of the return.
int RunRank(const std::string& spec_path, const ExitProcess& exit);

// Exit code of a process that ended for this reason: 0 only for COMPLETED.
int ExitCodeOf(v1::Reason reason);

// Runs `body` and turns every exception into a result: EngineError keeps its reason, bad_alloc is OUT_OF_MEMORY.
v1::RankResult ResultOf(const std::function<v1::RankResult()>& body);

RunIdentity MakeRunIdentity(const v1::RankSpec& spec);

// The context on plan.device that a rank trains in. Throws EngineError; OUT_OF_MEMORY names the plan.
Context MakeRankContext(const v1::RankSpec& spec, const TrainingPlan& plan);

// Trains on plan.device, in `context` of MakeRankContext, as rank spec.rank() of spec.world_size(), whose peers are met
// in the folder `rendezvous`. Says what memory is planned and, on a GPU, what was in use at the end: through the sink, or where
// there is none on standard output. Throws EngineError; OUT_OF_MEMORY names what was asked for, what there is and the plan,
// before the start also the layouts that fit. With several ranks a watchdog calls `end` from its thread where the training thread
// does not end by itself (engine/core/watchdog.h); its time is dist.distributed_timeout_minutes, or MB_WATCHDOG_SECONDS of the
// environment, for tests.
v1::RankResult RunTraining(const v1::RankSpec& spec, const TrainingPlan& plan, const Context& context,
                           const std::string& rendezvous, EventSink* sink, const std::function<void(const v1::RankResult&)>& end);

// Of the job that `spec` belongs to, which must outlive it.
LayoutResolver LayoutResolverOf(const v1::RankSpec& spec);

// One communicator over all ranks of a job, whose rendezvous files lie in `directory`: NCCL for a context on a GPU, else Gloo.
// Throws EngineError.
std::unique_ptr<Communicator> MakeWorld(const Context& context, const std::string& directory, int rank, int size,
                                        double timeout_seconds);

}  // namespace mbridge
