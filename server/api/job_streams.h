// The three streams of a job. Each reads from the store behind its own cursor, so that a resumed or slow reader misses
// nothing but progress.
#pragma once

#include <grpcpp/grpcpp.h>

#include "mbridge/v1/job_service.pb.h"
#include "server/api/context.h"

namespace mbridge::server {

// The last message of a job's stream; exit_code is what mbctl exits with.
v1::StreamEnd MakeStreamEnd(const v1::Job& job);

grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(const ServiceContext& context, const v1::WatchJobRequest& request);
grpc::ServerWriteReactor<v1::TailLogsResponse>* TailLogs(const ServiceContext& context, const v1::TailLogsRequest& request);
grpc::ServerWriteReactor<v1::StreamMetricsResponse>* StreamMetrics(const ServiceContext& context,
                                                                   const v1::StreamMetricsRequest& request);

}  // namespace mbridge::server
