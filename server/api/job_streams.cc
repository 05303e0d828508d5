#include "server/api/job_streams.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "server/api/paging.h"
#include "server/api/stream.h"

namespace mbridge::server {
namespace {

constexpr int kEventsAtOnce = 64;
constexpr int kPointsAtOnce = 512;
constexpr size_t kLogBytesAtOnce = 64 << 10;
constexpr int64_t kLogTail = 64 << 10;

class WatchStream : public Stream<v1::WatchJobResponse> {
 public:
  WatchStream(const ServiceContext& context, const v1::WatchJobRequest& request)
      : Stream("JobService/WatchJob", request.job_id(), context.feed, context.metrics),
        context_(context),
        after_(request.after_sequence()) {
    const auto job = context.controller->GetJob(request.job_id());
    if (job.ok() && !IsTerminal(job->state()) && job->has_progress()) progress_ = job->progress();
  }

 private:
  Next Produce(bool heartbeat_due, v1::WatchJobResponse* response, absl::Status* status) override {
    if (ended_) return Next::kFinish;
    // The job first: what happens after this look is found by the next one.
    const auto job = context_.controller->GetJob(job_id());
    if (!job.ok()) return Fail(job.status(), status);
    if (after_ < 0 || after_ > job->event_sequence()) {
      return Fail(InvalidFields(v1::REASON_INVALID_REQUEST, {{"after_sequence", "is not the sequence of an event of this job"}}),
                  status);
    }
    if (events_.empty()) {
      auto events = context_.store->ListEvents(job_id(), after_, kEventsAtOnce);
      if (!events.ok()) return Fail(events.status(), status);
      events_.assign(events->begin(), events->end());
    }
    {
      std::lock_guard lock(progress_mutex_);
      response->set_dropped_progress(dropped_);
      if (events_.empty() && progress_) {
        v1::JobEvent* event = response->mutable_event();
        event->set_job_id(job_id());
        event->set_kind(v1::EVENT_KIND_PROGRESS);
        event->set_state(job->state());
        event->set_attempt(progress_->attempt());
        *event->mutable_time() = progress_->time();
        *event->mutable_progress() = std::move(*progress_);
        progress_.reset();
        return Next::kWrite;
      }
    }
    if (!events_.empty()) {
      after_ = events_.front().sequence();
      *response->mutable_event() = std::move(events_.front());
      events_.pop_front();
      return Next::kWrite;
    }
    if (IsTerminal(job->state()) && after_ >= job->event_sequence()) {
      *response->mutable_end() = MakeStreamEnd(*job);
      ended_ = true;
      return Next::kWrite;
    }
    response->set_heartbeat(true);
    return heartbeat_due ? Next::kWrite : Next::kWait;
  }

  void OnProgress(const v1::MetricPoint& point) override {
    std::lock_guard lock(progress_mutex_);
    if (progress_) ++dropped_;
    progress_ = point;
  }
  int64_t dropped_progress() override {
    std::lock_guard lock(progress_mutex_);
    return dropped_;
  }
  static Next Fail(const absl::Status& why, absl::Status* status) {
    *status = why;
    return Next::kFinish;
  }

  const ServiceContext context_;
  int64_t after_;
  std::deque<v1::JobEvent> events_;  // Read from the store, not yet sent.
  bool ended_ = false;
  std::mutex progress_mutex_;
  std::optional<v1::MetricPoint> progress_;  // Only the newest one waits for a slow reader.
  int64_t dropped_ = 0;
};

class LogStream : public Stream<v1::TailLogsResponse> {
 public:
  LogStream(const ServiceContext& context, const v1::TailLogsRequest& request)
      : Stream("JobService/TailLogs", request.job_id(), context.feed, context.metrics),
        context_(context),
        request_(request),
        attempt_(request.attempt()),
        offset_(request.offset()) {}

 private:
  Next Produce(bool heartbeat_due, v1::TailLogsResponse* response, absl::Status* status) override {
    if (ended_) return Next::kFinish;
    const auto job = context_.controller->GetJob(job_id());
    *status = job.ok() ? CheckRequest(*job) : job.status();
    if (!status->ok()) return Next::kFinish;
    if (attempt_ == 0) attempt_ = job->attempts_size();
    if (attempt_ > 0 && offset_ < 0) {
      offset_ = std::max<int64_t>(0, context_.controller->logs().Size(job_id(), attempt_, request_.rank()) - kLogTail);
    }
    if (attempt_ > 0) {
      auto piece = context_.controller->logs().Read(job_id(), attempt_, request_.rank(), offset_, kLogBytesAtOnce);
      if (!piece.ok()) {
        *status = piece.status();
        return Next::kFinish;
      }
      if (!piece->data.empty()) {
        response->set_offset(piece->offset);
        response->set_attempt(attempt_);
        offset_ = piece->offset + static_cast<int64_t>(piece->data.size());
        response->set_data(std::move(piece->data));
        return Next::kWrite;
      }
    }
    if (!request_.follow()) return Next::kFinish;
    if (request_.attempt() == 0 && job->attempts_size() > attempt_) {
      attempt_ = job->attempts_size();
      offset_ = 0;
      return Produce(heartbeat_due, response, status);
    }
    if (AttemptIsOver(*job)) {
      *response->mutable_end() = MakeStreamEnd(*job);
      response->set_attempt(attempt_);
      ended_ = true;
      return Next::kWrite;
    }
    response->set_heartbeat(true);
    return heartbeat_due ? Next::kWrite : Next::kWait;
  }

  absl::Status CheckRequest(const v1::Job& job) const {
    std::vector<FieldViolation> wrong;
    if (request_.attempt() < 0 || request_.attempt() > job.attempts_size()) {
      wrong.push_back(
          {"attempt", fmt::format("{} is not one of the {} attempts of the job", request_.attempt(), job.attempts_size())});
    }
    if (request_.rank() < 0 || request_.rank() >= std::max(1, job.resolved().ranks())) {
      wrong.push_back(
          {"rank", fmt::format("{} is outside of 0 to {}", request_.rank(), std::max(1, job.resolved().ranks()) - 1)});
    }
    if (request_.offset() < -1) wrong.push_back({"offset", "must be -1 (the last 64 KiB) or at least 0"});
    return wrong.empty() ? absl::OkStatus() : InvalidFields(v1::REASON_INVALID_REQUEST, wrong);
  }
  bool AttemptIsOver(const v1::Job& job) const {
    if (IsTerminal(job.state())) return true;
    return request_.attempt() > 0 && job.attempts(request_.attempt() - 1).has_end_time();
  }

  const ServiceContext context_;
  const v1::TailLogsRequest request_;
  int32_t attempt_;
  int64_t offset_;
  bool ended_ = false;
};

class MetricStream : public Stream<v1::StreamMetricsResponse> {
 public:
  MetricStream(const ServiceContext& context, const v1::StreamMetricsRequest& request)
      : Stream("JobService/StreamMetrics", request.job_id(), context.feed, context.metrics),
        context_(context),
        request_(request) {
    token_is_valid_ = FromHex(request.resume_token(), &cursor_);
  }

 private:
  Next Produce(bool heartbeat_due, v1::StreamMetricsResponse* response, absl::Status* status) override {
    if (ended_) return Next::kFinish;
    const auto job = context_.controller->GetJob(job_id());
    *status = !job.ok() ? job.status()
              : token_is_valid_
                  ? absl::OkStatus()
                  : InvalidFields(v1::REASON_INVALID_REQUEST, {{"resume_token", "is not one that this server gave out"}});
    if (!status->ok()) return Next::kFinish;
    auto page = context_.store->ListMetrics(job_id(), request_.attempt(), request_.effective(), cursor_, kPointsAtOnce);
    if (!page.ok()) {
      *status = page.status();
      return Next::kFinish;
    }
    cursor_ = page->cursor;
    response->set_resume_token(ToHex(cursor_));
    if (!page->points.empty()) {
      for (auto& point : page->points) *response->add_points() = std::move(point);
      return Next::kWrite;
    }
    if (!request_.follow()) return Next::kFinish;
    if (IsTerminal(job->state())) {
      *response->mutable_end() = MakeStreamEnd(*job);
      ended_ = true;
      return Next::kWrite;
    }
    response->set_heartbeat(true);
    return heartbeat_due ? Next::kWrite : Next::kWait;
  }

  const ServiceContext context_;
  const v1::StreamMetricsRequest request_;
  std::string cursor_;
  bool token_is_valid_ = false;
  bool ended_ = false;
};

}  // namespace

v1::StreamEnd MakeStreamEnd(const v1::Job& job) {
  v1::StreamEnd end;
  end.set_state(job.state());
  end.set_reason(job.reason());
  end.set_detail(job.detail());
  const int listed = InfoOf(job.reason()).exit_code();
  // Of the ends of a job only success is 0, whatever the table says; a job that goes on (the log of an earlier attempt
  // has ended) has no exit code yet.
  const bool bad = job.state() == v1::JOB_STATE_FAILED || job.state() == v1::JOB_STATE_CANCELLED;
  end.set_exit_code(bad ? std::max(1, listed) : 0);
  return end;
}

grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(const ServiceContext& context, const v1::WatchJobRequest& request) {
  return WatchStream::Start(std::make_shared<WatchStream>(context, request));
}

grpc::ServerWriteReactor<v1::TailLogsResponse>* TailLogs(const ServiceContext& context, const v1::TailLogsRequest& request) {
  return LogStream::Start(std::make_shared<LogStream>(context, request));
}

grpc::ServerWriteReactor<v1::StreamMetricsResponse>* StreamMetrics(const ServiceContext& context,
                                                                   const v1::StreamMetricsRequest& request) {
  return MetricStream::Start(std::make_shared<MetricStream>(context, request));
}

}  // namespace mbridge::server
