// A server stream that is pulled, not pushed: at most one message is in flight, the next one is read from the store when
// the reader has taken it. A reader that stops reading therefore costs one message of memory, whatever happens meanwhile.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "proto/rpc/status_details.h"
#include "server/api/feed.h"
#include "server/api/grpc_status.h"
#include "server/metrics/service_metrics.h"

namespace mbridge::server {

inline constexpr std::chrono::seconds kHeartbeat{5};

template <class Response> class Stream : public grpc::ServerWriteReactor<Response>, public Subscriber {
 public:
  Stream(const char* method, std::string job_id, Feed* feed, ServiceMetrics* metrics)
      : method_(method), job_id_(std::move(job_id)), feed_(feed), metrics_(metrics) {}

  // Owns itself until OnDone.
  static grpc::ServerWriteReactor<Response>* Start(std::shared_ptr<Stream> stream) {
    Stream* raw = stream.get();
    raw->self_ = stream;
    raw->metrics_->CallStarted();
    raw->metrics_->StreamOpened(raw->method_);
    raw->feed_->Add(raw->job_id_, stream);
    raw->Pump();
    return raw;
  }

  void Wake(const std::optional<v1::MetricPoint>& progress) override {
    if (progress) OnProgress(*progress);
    Pump();
  }
  void Stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    Pump();
  }
  void OnWriteDone(bool ok) override {
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
      broken_ = broken_ || !ok;
      last_write_ = std::chrono::steady_clock::now();
    }
    Pump();
  }
  void OnCancel() override {
    {
      std::lock_guard lock(mutex_);
      broken_ = true;
    }
    Pump();
  }
  void OnDone() override {
    feed_->Remove(job_id_, this);
    metrics_->StreamClosed(method_, dropped_progress());
    self_.reset();
  }

 protected:
  enum class Next { kWrite, kWait, kFinish };
  // Fills the next message, or says that there is none now, or that the stream is over with `status`. Called by one
  // thread at a time, never with a message in flight.
  virtual Next Produce(bool heartbeat_due, Response* response, absl::Status* status) = 0;
  virtual void OnProgress(const v1::MetricPoint& point) {}
  virtual int64_t dropped_progress() { return 0; }

  const std::string& job_id() const { return job_id_; }

 private:
  // gRPC may call back on this thread from StartWrite and Finish, so no lock is held there.
  void Pump() {
    for (;;) {
      absl::Status status;
      {
        std::lock_guard lock(mutex_);
        if (finished_) return;
        if (busy_) {
          again_ = true;
          return;
        }
        busy_ = true;
        again_ = false;
        if (broken_) status = absl::CancelledError("the client has gone");
        if (!broken_ && stopping_) {
          status = MakeStatus(absl::StatusCode::kUnavailable, v1::REASON_SERVICE_STOPPING,
                              "the coordinator is stopping; jobs go on, connect again when it is back");
        }
      }
      Next next = Next::kFinish;
      if (status.ok()) {
        response_.Clear();
        next = Produce(std::chrono::steady_clock::now() - last_write_ >= kHeartbeat, &response_, &status);
      }
      if (next == Next::kWrite) return this->StartWrite(&response_);
      if (next == Next::kFinish) {
        {
          std::lock_guard lock(mutex_);
          finished_ = true;
        }
        metrics_->GrpcHandled(method_, CodeName(status.code()));
        return this->Finish(ToGrpc(status));
      }
      std::lock_guard lock(mutex_);
      busy_ = false;
      if (!again_) return;
    }
  }

  const char* const method_;
  const std::string job_id_;
  Feed* const feed_;
  ServiceMetrics* const metrics_;
  std::shared_ptr<Stream> self_;
  Response response_;
  std::mutex mutex_;
  bool busy_ = false;   // A message is in flight, or Produce runs.
  bool again_ = false;  // Woken while busy.
  bool broken_ = false, stopping_ = false, finished_ = false;
  std::chrono::steady_clock::time_point last_write_ = std::chrono::steady_clock::now();
};

}  // namespace mbridge::server
