// Where a training run reports to: a spool file under the agent, the terminal when standalone.
//
// Called on rank 0 only, from the training thread. A sink never throws and never stops training: what it cannot deliver it
// counts and reports later.
#pragma once

#include <string>

#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/metric.pb.h"
#include "mbridge/v1/rank.pb.h"

namespace mbridge {

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void Started(const v1::RankStarted& started) = 0;
  virtual void Metric(const v1::MetricPoint& point) = 0;
  // The directory is durable; the coordinator commits it.
  virtual void CheckpointWritten(const v1::Checkpoint& checkpoint) = 0;
  virtual void Message(const std::string& text) = 0;
};

}  // namespace mbridge
