#include "engine/core/side_stream.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <omp.h>

#include "engine/core/device.h"

namespace mbridge {
namespace {

class InlineStream : public SideStream {
 public:
  explicit InlineStream(const Context& main) : context_(main) {}
  const Context& context() const override { return context_; }
  void Start(int, std::function<void()> work) override { work(); }
  void Join(int) override {}
  void Stop() override {}

 private:
  const Context context_;
};

class ThreadStream : public SideStream {
 public:
  ThreadStream(const Context& main, int slots) : context_(main), waiting_(static_cast<size_t>(slots), 0) {
    thread_ = std::thread([this] { Run(); });
  }
  ~ThreadStream() override { ThreadStream::Stop(); }
  ThreadStream(const ThreadStream&) = delete;
  ThreadStream& operator=(const ThreadStream&) = delete;

  const Context& context() const override { return context_; }

  void Start(int slot, std::function<void()> work) override {
    {
      const std::lock_guard lock(mutex_);
      if (error_ != nullptr) std::rethrow_exception(error_);
      queue_.emplace_back(slot, std::move(work));
      ++waiting_.at(static_cast<size_t>(slot));
    }
    changed_.notify_all();
  }

  void Join(int slot) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ != nullptr || waiting_.at(static_cast<size_t>(slot)) == 0; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

  void Stop() override {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    omp_set_num_threads(1);  // The other cores compute.
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
      if (stopped_) return;
      const auto [slot, work] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      --waiting_[static_cast<size_t>(slot)];
      if (error != nullptr) {
        error_ = error;
        queue_.clear();
      }
      changed_.notify_all();
      if (error != nullptr) return;
    }
  }

  const Context context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int, std::function<void()>>> queue_;
  std::vector<int> waiting_;  // By slot: work that is not done.
  std::exception_ptr error_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<SideStream> MakeInlineStream(const Context& main) { return std::make_unique<InlineStream>(main); }

std::unique_ptr<SideStream> MakeSideStream(const Context& main, int slots) {
  return DeviceOf(main.device).MakeSideStream(main, slots);
}

std::unique_ptr<SideStream> MakeThreadStream(const Context& main, int slots) {
  return std::make_unique<ThreadStream>(main, slots);
}

}  // namespace mbridge
