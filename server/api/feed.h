// Wakes the open streams of a job when something about it changes.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mbridge/v1/metric.pb.h"

namespace mbridge::server {

class Subscriber {
 public:
  virtual ~Subscriber() = default;
  // Something changed, or time has passed. Cheap where there is nothing to say.
  virtual void Wake(const std::optional<v1::MetricPoint>& progress) = 0;
  virtual void Stop() = 0;  // The service stops.
};

// Thread-safe. Subscribers are called without a lock held, possibly once after Remove.
class Feed {
 public:
  void Add(const std::string& job_id, std::shared_ptr<Subscriber> subscriber);
  void Remove(const std::string& job_id, const Subscriber* subscriber);
  void Notify(const std::string& job_id, const std::optional<v1::MetricPoint>& progress);
  void Tick();  // Wakes all, for heartbeats.
  void Stop();  // Stops all, and those that come later.

 private:
  std::vector<std::shared_ptr<Subscriber>> Of(const std::string& job_id);
  std::vector<std::shared_ptr<Subscriber>> All();
  std::mutex mutex_;
  bool stopped_ = false;
  std::map<std::string, std::vector<std::shared_ptr<Subscriber>>> by_job_;
};

}  // namespace mbridge::server
