// Row keys of the store. The first byte names the table; numbers are big-endian so that rows sort as their numbers do.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "mbridge/v1/checkpoint.pb.h"
#include "mbridge/v1/metric.pb.h"

namespace mbridge::server::keys {

inline constexpr char kJob = 'J';           // J<job id> -> Job without resolved.values
inline constexpr char kResolved = 'R';      // R<job id> -> ResolvedConfig
inline constexpr char kEvent = 'E';         // E<job id>\0<sequence> -> JobEvent
inline constexpr char kMetric = 'M';        // M<job id>\0<attempt><step><final pass><kind> -> MetricPoint
inline constexpr char kCheckpoint = 'C';    // C<checkpoint id> -> Checkpoint
inline constexpr char kRunIndex = 'K';      // K<run name>\0<commit time><checkpoint id> -> empty
inline constexpr char kRequest = 'I';       // I<request id> -> "job id\nbody hash\nunix seconds"
inline constexpr char kNode = 'N';          // N<node id> -> Node
inline constexpr char kOutbox = 'O';        // O<node id>\0<task id> -> NodeTask
inline constexpr char kAcknowledged = 'A';  // A<job id>\0<attempt> -> decimal sequence
inline constexpr char kQuarantine = 'Q';    // Q<key of a row that did not parse> -> its value
inline constexpr char kMeta = 'V';          // V<name> -> text

void AppendBigEndian(std::string* key, uint64_t value, int bytes);
uint64_t ReadBigEndian(std::string_view bytes);

std::string Plain(char table, std::string_view id);
// `table`<id>\0: the prefix of every row of a composite table that belongs to `id`.
std::string Prefix(char table, std::string_view id);

std::string Event(std::string_view job_id, int64_t sequence);
// The part of a metric key behind its prefix: fixed length, the cursor of ListMetrics.
inline constexpr size_t kMetricSuffix = 4 + 8 + 1 + 1;
std::string MetricSuffix(const v1::MetricPoint& point);
std::string RunIndex(const v1::Checkpoint& checkpoint);
std::string Outbox(std::string_view node_id, std::string_view task_id);
std::string Acknowledged(std::string_view job_id, int32_t attempt);

// Printable form for messages: table, text, numbers as \xHH.
std::string Describe(std::string_view key);

}  // namespace mbridge::server::keys
