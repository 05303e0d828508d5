// Events of a supervised rank: the metric spool for the agent, Megatron-LM's lines for the log.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/train/event_sink.h"
#include "worker/spool/record_file.h"

namespace mbridge {

// Records that cannot be written (full disk) are counted by the writer; training goes on.
class SpoolSink : public EventSink {
 public:
  // `log_throughput`: logger.log_throughput, TFLOP/s in the log line.
  SpoolSink(std::unique_ptr<spool::RecordWriter> writer, bool log_throughput)
      : writer_(std::move(writer)), log_throughput_(log_throughput) {}

  void Started(const v1::RankStarted& started) override;
  void Metric(const v1::MetricPoint& point) override;
  void CheckpointWritten(const v1::Checkpoint& checkpoint) override;
  void Message(const std::string& text) override;
  void Finished(const v1::RankResult& result);

 private:
  void Append(v1::RankRecord record);
  // True when it is in the file.
  bool TryAppend(const v1::RankRecord& record);

  std::unique_ptr<spool::RecordWriter> writer_;
  const bool log_throughput_;
  std::vector<v1::RankRecord> unsent_;  // Checkpoints and the end must reach the store; they are tried again before each record.
};

}  // namespace mbridge
