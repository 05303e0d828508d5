#include "worker/agent/supervise.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include <spdlog/spdlog.h>

namespace mbridge::agent {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kTick{50};
// Between two calls where the coordinator does not wait, so that a chatty rank does not make agent and coordinator spin.
constexpr milliseconds kBetweenCalls{50};
constexpr milliseconds kAnswerTime{5000};  // On top of the time that the coordinator may wait.
constexpr milliseconds kFirstPause{100};
constexpr milliseconds kLongestPause{2000};
constexpr auto kComplainAgain = std::chrono::minutes(1);

// Growing, jittered pauses after failures: agents of a whole cluster do not come back at the same moment.
class Backoff {
 public:
  milliseconds Next() {
    pause_ = std::min(pause_ * 2, kLongestPause);
    return milliseconds(std::uniform_int_distribution<int64_t>(pause_.count() / 2, pause_.count())(random_));
  }
  void Reset() { pause_ = kFirstPause / 2; }

 private:
  milliseconds pause_ = kFirstPause / 2;
  std::mt19937_64 random_{std::random_device{}()};
};

// Says once that the coordinator is away, from time to time that it still is, and that it is back.
class Outage {
 public:
  void Failed(const absl::Status& status, TimePoint now) {
    if (away_ && now - said_ < kComplainAgain) return;
    spdlog::warn("coordinator does not answer, ranks go on: {}", std::string(status.message()));
    away_ = true;
    said_ = now;
  }
  void Answered() {
    if (away_) spdlog::info("coordinator answers again");
    away_ = false;
  }

 private:
  bool away_ = false;
  TimePoint said_{};
};

}  // namespace

void Supervise(Agent* agent, CoordinatorLink* link, const std::atomic<bool>& stop) {
  Backoff backoff;
  Outage outage;
  TimePoint next_call{};
  TimePoint last_call{};
  milliseconds between{0};
  while (true) {
    const TimePoint now = steady_clock::now();
    if (stop.load()) {
      if (::getpid() != 1) return;
      agent->BeginShutdown(now);
    }
    agent->Tick(now);
    if (auto answer = link->TakeAnswer()) {
      if (answer->ok()) {
        outage.Answered();
        backoff.Reset();
        agent->Apply(**answer, now);
        next_call = last_call + between;
      } else {
        outage.Failed(answer->status(), now);
        next_call = now + backoff.Next();
      }
    }
    if (agent->finished(now)) return;
    if (!link->busy() && now >= next_call) {
      const v1::SyncRequest request = agent->BuildRequest();
      link->StartSync(request, milliseconds(request.wait_ms()) + kAnswerTime);
      last_call = now;
      between = request.wait_ms() > 0 ? kBetweenCalls : milliseconds(0);  // 0: more is waiting to be sent.
    }
    link->Wait(kTick);
  }
}

}  // namespace mbridge::agent
