#include "server/api/feed.h"

#include <algorithm>

namespace mbridge::server {

void Feed::Add(const std::string& job_id, std::shared_ptr<Subscriber> subscriber) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      by_job_[job_id].push_back(std::move(subscriber));
      return;
    }
  }
  subscriber->Stop();
}

void Feed::Remove(const std::string& job_id, const Subscriber* subscriber) {
  std::lock_guard lock(mutex_);
  const auto found = by_job_.find(job_id);
  if (found == by_job_.end()) return;
  std::erase_if(found->second, [subscriber](const auto& each) { return each.get() == subscriber; });
  if (found->second.empty()) by_job_.erase(found);
}

std::vector<std::shared_ptr<Subscriber>> Feed::Of(const std::string& job_id) {
  std::lock_guard lock(mutex_);
  const auto found = by_job_.find(job_id);
  return found == by_job_.end() ? std::vector<std::shared_ptr<Subscriber>>() : found->second;
}

std::vector<std::shared_ptr<Subscriber>> Feed::All() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Subscriber>> all;
  for (const auto& [job_id, subscribers] : by_job_) all.insert(all.end(), subscribers.begin(), subscribers.end());
  return all;
}

void Feed::Notify(const std::string& job_id, const std::optional<v1::MetricPoint>& progress) {
  for (const auto& subscriber : Of(job_id)) subscriber->Wake(progress);
}

void Feed::Tick() {
  for (const auto& subscriber : All()) subscriber->Wake(std::nullopt);
}

void Feed::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  for (const auto& subscriber : All()) subscriber->Stop();
}

}  // namespace mbridge::server
