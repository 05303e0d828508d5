// The streams of Client: each keeps the token it would resume from and hands on only what is new.
#include <set>
#include <tuple>

#include "client/lib/channel.h"
#include "client/lib/stream.h"
#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

using PointKey = std::tuple<int, int, int64_t, bool>;

PointKey KeyOf(const v1::MetricPoint& point) { return {point.kind(), point.attempt(), point.step(), point.final_pass()}; }

}  // namespace

absl::StatusOr<v1::StreamEnd> Client::WatchJob(const std::string& job_id, int64_t after_sequence,
                                               const std::function<void(const v1::JobEvent&)>& on_event, std::stop_token stop) {
  v1::WatchJobRequest request;
  request.set_job_id(job_id);
  request.set_after_sequence(after_sequence);
  v1::StreamEnd end;
  const auto on_message = [&](const v1::WatchJobResponse& message) {
    Received received = Received::kHeartbeat;
    if (message.has_event()) {
      const v1::JobEvent& event = message.event();
      const bool stored = event.sequence() > 0;
      if (!stored || event.sequence() > request.after_sequence()) {
        on_event(event);
        received = Received::kNews;
      }
      if (stored) request.set_after_sequence(std::max(request.after_sequence(), event.sequence()));
    }
    if (!message.has_end()) return received;
    end = message.end();
    return Received::kEnd;
  };
  MB_RETURN_IF_ERROR(ReadUntilComplete(impl_->options, stop, false, [&] {
    return ReadStream<v1::WatchJobResponse>(
        impl_->options.silence_limit, stop,
        [&](auto* context, auto* queue) { return impl_->jobs->PrepareAsyncWatchJob(context, request, queue); }, on_message);
  }));
  return end;
}

namespace {

// Reads a log from position->offset on and leaves there what comes next; returns the end message when following.
absl::StatusOr<v1::StreamEnd> TailLogs(const ConnectionOptions& options, v1::JobService::Stub* jobs, Client::LogQuery* position,
                                       bool follow, const Client::LogSink& sink, const std::stop_token& stop) {
  v1::TailLogsRequest request;
  request.set_job_id(position->job_id);
  request.set_attempt(position->attempt);
  request.set_rank(position->rank);
  request.set_offset(position->offset);
  request.set_follow(follow);
  v1::StreamEnd end;
  // Offsets count within one attempt; when following the newest, the next attempt begins at 0 again.
  const auto on_message = [&](const v1::TailLogsResponse& message) {
    Received received = Received::kHeartbeat;
    if (!message.data().empty()) {
      std::string data = message.data();
      const bool same_attempt = request.attempt() == message.attempt() || message.attempt() == 0;
      if (same_attempt && request.offset() > message.offset()) {
        const auto known = static_cast<size_t>(request.offset() - message.offset());
        data.erase(0, std::min(known, data.size()));
      }
      if (message.attempt() != 0) request.set_attempt(message.attempt());
      request.set_offset(
          std::max(same_attempt ? request.offset() : 0, message.offset() + static_cast<int64_t>(message.data().size())));
      if (!data.empty()) {
        sink(data, message.attempt());
        received = Received::kNews;
      }
    }
    if (!message.has_end()) return received;
    end = message.end();
    return Received::kEnd;
  };
  MB_RETURN_IF_ERROR(ReadUntilComplete(options, stop, !follow, [&] {
    return ReadStream<v1::TailLogsResponse>(
        options.silence_limit, stop,
        [&](auto* context, auto* queue) { return jobs->PrepareAsyncTailLogs(context, request, queue); }, on_message);
  }));
  position->attempt = request.attempt();
  position->offset = request.offset();
  return end;
}

// Points once each, in the server's order; returns the end message when following.
absl::StatusOr<v1::StreamEnd> StreamMetrics(const ConnectionOptions& options, v1::JobService::Stub* jobs,
                                            const Client::MetricQuery& query, bool follow,
                                            const std::function<void(const v1::MetricPoint&)>& on_point,
                                            const std::stop_token& stop) {
  v1::StreamMetricsRequest request;
  request.set_job_id(query.job_id);
  request.set_attempt(query.attempt);
  request.set_effective(query.effective);
  request.set_follow(follow);
  v1::StreamEnd end;
  std::set<PointKey> delivered;
  const auto on_message = [&](const v1::StreamMetricsResponse& message) {
    Received received = Received::kHeartbeat;
    for (const v1::MetricPoint& point : message.points()) {
      if (!delivered.insert(KeyOf(point)).second) continue;
      on_point(point);
      received = Received::kNews;
    }
    if (!message.resume_token().empty()) request.set_resume_token(message.resume_token());
    if (!message.has_end()) return received;
    end = message.end();
    return Received::kEnd;
  };
  MB_RETURN_IF_ERROR(ReadUntilComplete(options, stop, !follow, [&] {
    StreamAttempt attempt = ReadStream<v1::StreamMetricsResponse>(
        options.silence_limit, stop,
        [&](auto* context, auto* queue) { return jobs->PrepareAsyncStreamMetrics(context, request, queue); }, on_message);
    // The token is too old: from the oldest again, what was delivered already is left out.
    if (ReasonOf(attempt.status) == v1::REASON_RESUME_CONSUMED && !request.resume_token().empty()) {
      request.clear_resume_token();
      attempt.status = absl::UnavailableError("resume token no longer held");
    }
    return attempt;
  }));
  return end;
}

}  // namespace

absl::Status Client::ReadLog(const LogQuery& query, const LogSink& sink, std::stop_token stop) {
  LogQuery position = query;
  return TailLogs(impl_->options, impl_->jobs.get(), &position, false, sink, stop).status();
}

absl::StatusOr<v1::StreamEnd> Client::FollowLog(const LogQuery& query, const LogSink& sink, std::stop_token stop) {
  LogQuery position = query;
  for (;;) {
    MB_ASSIGN_OR_RETURN(v1::StreamEnd end, TailLogs(impl_->options, impl_->jobs.get(), &position, true, sink, stop));
    if (query.attempt != 0) return end;
    // A stream that was taken up again names its attempt and ends with it; attempts that began since are read after it.
    MB_ASSIGN_OR_RETURN(const v1::Job job, GetJob(query.job_id));
    if (position.attempt > 0 && position.attempt < job.attempts_size()) {
      ++position.attempt;
      position.offset = 0;
    } else if (end.state() >= v1::JOB_STATE_SUCCEEDED) {
      return end;
    } else if (!SleepUnlessStopped(std::chrono::seconds(1), stop)) {
      return absl::CancelledError("stopped by the caller");
    }
  }
}

absl::StatusOr<std::vector<v1::MetricPoint>> Client::ReadMetrics(const MetricQuery& query, std::stop_token stop) {
  std::vector<v1::MetricPoint> points;
  MB_RETURN_IF_ERROR(StreamMetrics(
                         impl_->options, impl_->jobs.get(), query, false,
                         [&points](const v1::MetricPoint& point) { points.push_back(point); }, stop)
                         .status());
  return points;
}

absl::StatusOr<v1::StreamEnd> Client::FollowMetrics(const MetricQuery& query,
                                                    const std::function<void(const v1::MetricPoint&)>& on_point,
                                                    std::stop_token stop) {
  return StreamMetrics(impl_->options, impl_->jobs.get(), query, true, on_point, stop);
}

}  // namespace mbridge::client
