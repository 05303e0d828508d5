#include "worker/rank/spool_sink.h"

#include <cstdio>

#include "proto/format/training_line.h"

namespace mbridge {

void SpoolSink::Started(const v1::RankStarted& started) {
  std::printf("training starts after iteration %ld, %ld parameters\n", static_cast<long>(started.first_step()),
              static_cast<long>(started.parameters()));
  std::fflush(stdout);
  v1::RankRecord record;
  *record.mutable_started() = started;
  Append(std::move(record));
}

void SpoolSink::Metric(const v1::MetricPoint& point) {
  std::printf("%s\n", FormatPoint(point, {.throughput = log_throughput_}).c_str());
  std::fflush(stdout);
  v1::RankRecord record;
  *record.mutable_metric() = point;
  Append(std::move(record));
}

void SpoolSink::CheckpointWritten(const v1::Checkpoint& checkpoint) {
  std::printf("checkpoint of iteration %ld written to %s\n", static_cast<long>(checkpoint.step()), checkpoint.path().c_str());
  std::fflush(stdout);
  v1::RankRecord record;
  *record.mutable_checkpoint() = checkpoint;
  Append(std::move(record));
}

void SpoolSink::Message(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
  v1::RankRecord record;
  record.set_message(text);
  Append(std::move(record));
}

void SpoolSink::Finished(const v1::RankResult& result) {
  v1::RankRecord record;
  *record.mutable_finished() = result;
  Append(std::move(record));
}

void SpoolSink::Append(v1::RankRecord record) {
  while (!unsent_.empty() && TryAppend(unsent_.front())) unsent_.erase(unsent_.begin());
  const bool must_arrive = record.has_checkpoint() || record.has_finished();
  if ((!unsent_.empty() || !TryAppend(record)) && must_arrive) unsent_.push_back(std::move(record));
}

bool SpoolSink::TryAppend(const v1::RankRecord& record) {
  const absl::Status status = writer_->Append(record);
  if (!status.ok()) std::fprintf(stderr, "metric spool: %s\n", std::string(status.message()).c_str());
  return status.ok();
}

}  // namespace mbridge
