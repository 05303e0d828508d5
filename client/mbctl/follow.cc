#include "client/mbctl/follow.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/interrupt.h"
#include "client/mbctl/output.h"
#include "client/mbctl/progress_line.h"
#include "proto/format/training_line.h"
#include "proto/rpc/status_details.h"

namespace mbridge::mbctl {
namespace {

constexpr auto kPlainProgressInterval = std::chrono::seconds(30);
// How long the points of a finished job may take to arrive.
constexpr auto kLastPoints = std::chrono::seconds(15);

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string StateName(v1::JobState state) { return Lower(StripPrefix(v1::JobState_Name(state), "JOB_STATE_")); }

// "NAN_LOSS: the detail", "NAN_LOSS", "the detail" or "".
std::string ReasonAndDetail(v1::Reason reason, const std::string& detail) {
  std::string text = reason == v1::REASON_UNSPECIFIED ? "" : ReasonName(reason);
  if (!detail.empty()) text += (text.empty() ? "" : ": ") + detail;
  return text;
}

class Follower {
 public:
  Follower(Session* session, client::Client* client, std::string job_id, const FollowOptions& options)
      : session_(session),
        client_(client),
        job_id_(std::move(job_id)),
        options_(options),
        progress_(session->err, session->terminal) {
    progress_.Update("connecting", point_);
  }

  int Run() {
    // What a CI runner sends to a job that it gives up. Without the cancelling these end mbctl alone, as they do other programs.
    const std::vector<int> signals =
        options_.cancel_on_interrupt ? std::vector<int>{SIGINT, SIGTERM, SIGHUP} : std::vector<int>{SIGINT};
    const Interrupt interrupt([this](int count) { OnInterrupt(count); }, signals);
    std::jthread timer;
    if (options_.timeout_seconds) {
      timer = std::jthread([this](std::stop_token stop) { Expire(stop); });
    }
    std::jthread points;
    std::promise<absl::Status> points_promise;
    auto points_done = points_promise.get_future();
    if (options_.lines) {
      points = std::jthread([&] {
        const auto end = client_->FollowMetrics(
            {.job_id = job_id_}, [this](const v1::MetricPoint& point) { OnPoint(point); }, points_stop_.get_token());
        points_promise.set_value(end.status());
      });
    }
    const auto end = client_->WatchJob(
        job_id_, 0, [this](const v1::JobEvent& event) { OnEvent(event); }, stop_.get_token());
    if (options_.lines) {
      const bool wait_for_rest = end.ok() && points_done.wait_for(kLastPoints) == std::future_status::ready;
      points_stop_.request_stop();
      points.join();
      const absl::Status status = points_done.get();
      if (end.ok() && (!wait_for_rest || !status.ok())) {
        Say(fmt::format("the points are incomplete ({}); all of them: mbctl metrics {}", std::string(status.message()), job_id_));
      }
    }
    return Finish(end);
  }

 private:
  void OnEvent(const v1::JobEvent& event) {
    const std::lock_guard lock(session_->mutex());
    if (event.kind() == v1::EVENT_KIND_PROGRESS) {
      point_ = event.progress();
      Redraw();
      return;
    }
    if (session_->json()) {
      if (options_.lines) {
        v1::WatchJobResponse message;
        *message.mutable_event() = event;
        session_->out << ToJson(message, false) << std::flush;
      }
    }
    switch (event.kind()) {
      case v1::EVENT_KIND_CHECKPOINT:
        Say(fmt::format("checkpoint {} {}", event.checkpoint_id(), event.detail().empty() ? "saved" : event.detail()));
        break;
      case v1::EVENT_KIND_STATE: {
        state_ = StateName(event.state());
        const std::string why = ReasonAndDetail(event.reason(), event.detail());
        // The end is said once, by Finish.
        const bool terminal = event.state() >= v1::JOB_STATE_SUCCEEDED;
        if (!terminal) {
          const std::string attempt = event.attempt() > 1 ? fmt::format(" (attempt {})", event.attempt()) : "";
          Say(fmt::format("job {} {}{}{}", job_id_, state_, attempt, why.empty() ? "" : ", " + why));
        }
        break;
      }
      default:
        if (!event.detail().empty()) Say(event.detail());
    }
    Redraw();
  }

  void OnPoint(const v1::MetricPoint& point) {
    const std::lock_guard lock(session_->mutex());
    if (point.kind() == v1::METRIC_KIND_TRAIN) point_ = point;
    // On one terminal the line of the bar must be free first.
    if (session_->terminal.out_is_terminal) progress_.Clear();
    if (session_->json()) {
      v1::StreamMetricsResponse message;
      *message.add_points() = point;
      session_->out << ToJson(message, false) << std::flush;
    } else {
      session_->out << FormatPoint(point, {.throughput = options_.throughput}) << std::endl;
    }
    Redraw();
  }

  void Redraw() {
    if (session_->quiet) return;
    progress_.Update(state_, point_);
    if (session_->terminal.progress || options_.lines || point_.step() == 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_plain_ < kPlainProgressInterval) return;
    last_plain_ = now;
    session_->Say(FormatProgress(state_, point_, 500, false));
  }

  void Say(const std::string& line) {
    const std::lock_guard lock(session_->mutex());
    progress_.Clear();
    session_->Say(line);
  }

  void OnInterrupt(int count) {
    if (options_.cancel_on_interrupt && count == 1) {
      Say(fmt::format("interrupted, cancelling job {} (Ctrl-C again detaches)", job_id_));
      const auto cancelled = client_->CancelJob(job_id_, false);
      if (!cancelled.ok()) Say(DescribeError(cancelled.status()));
      return;
    }
    interrupted_ = true;
    Stop();
  }

  void Expire(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    wake.wait_for(lock, stop, std::chrono::duration<double>(*options_.timeout_seconds), [] { return false; });
    if (stop.stop_requested()) return;
    timed_out_ = true;
    Stop();
  }

  void Stop() {
    stop_.request_stop();
    points_stop_.request_stop();
  }

  int Finish(const absl::StatusOr<v1::StreamEnd>& end) {
    const std::lock_guard lock(session_->mutex());
    progress_.Clear();
    if (!end.ok()) {
      if (interrupted_) {
        SayDetached(session_, job_id_, fmt::format("mbctl follow {}", job_id_));
        return client::kExitInterrupted;
      }
      if (timed_out_) {
        Say(fmt::format("timed out; job {} goes on (mbctl follow {}, mbctl cancel {})", job_id_, job_id_, job_id_));
        return client::kExitTimedOut;
      }
      const int code = session_->Fail(end.status());
      if (code == client::kExitConnectionLost) {
        Say(fmt::format("the job may well be running; look again with: mbctl get {}", job_id_));
      }
      return code;
    }
    const int code = client::ExitCodeOf(*end);
    const std::string why = ReasonAndDetail(end->reason(), end->detail());
    Say(fmt::format("job {} {}{}", job_id_, StateName(end->state()), why.empty() ? "" : ", " + why));
    if (code != 0 && !InfoOf(end->reason()).help().empty()) Say("next: " + InfoOf(end->reason()).help());
    if (end->state() == v1::JOB_STATE_FAILED) Say(fmt::format("its log: mbctl logs {}", job_id_));
    if (session_->json() && options_.lines) {
      v1::WatchJobResponse message;
      *message.mutable_end() = *end;
      session_->out << ToJson(message, false) << std::flush;
    }
    return code;
  }

  Session* session_;
  client::Client* client_;
  std::string job_id_;
  FollowOptions options_;
  ProgressLine progress_;
  std::stop_source stop_, points_stop_;
  std::string state_ = "waiting";
  v1::MetricPoint point_;
  std::chrono::steady_clock::time_point last_plain_ = std::chrono::steady_clock::now();
  std::atomic<bool> interrupted_{false}, timed_out_{false};
};

}  // namespace

int FollowJob(Session* session, const std::string& job_id, const FollowOptions& options) {
  MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
  return Follower(session, client, job_id, options).Run();
}

void SayDetached(Session* session, const std::string& job_id, const std::string& again) {
  const std::lock_guard lock(session->mutex());
  // Also with --quiet: who detaches needs the id.
  session->err << fmt::format("mbctl: detached; job {} goes on. Come back: {}   Stop it: mbctl cancel {}\n", job_id, again,
                              job_id)
               << std::flush;
}

void AddFollowFlags(CLI::App* command, FollowFlags* flags, bool with_mode) {
  if (with_mode) {
    auto* follow = command->add_flag("-f,--follow", flags->follow, "Print each training line, until the job has ended");
    command->add_flag("-w,--wait", flags->wait, "Wait until the job has ended; the exit code is the job's")->excludes(follow);
  }
  command->add_option("--timeout", flags->timeout, "Stop waiting after this time (90s, 10m, 2h): exit code 6, the job goes on")
      ->type_name("TIME");
  command->add_flag("--cancel-on-interrupt", flags->cancel_on_interrupt,
                    "Ctrl-C, SIGTERM and SIGHUP cancel the job (for CI); without it Ctrl-C only detaches");
}

absl::StatusOr<FollowOptions> ToFollowOptions(const FollowFlags& flags) {
  FollowOptions options;
  options.lines = flags.follow;
  options.cancel_on_interrupt = flags.cancel_on_interrupt;
  if (!flags.timeout.empty()) {
    MB_ASSIGN_OR_RETURN(options.timeout_seconds, ParseDuration(flags.timeout));
  }
  return options;
}

void AddFollow(CLI::App* app, Session* session) {
  for (const bool lines : {true, false}) {
    auto* command = app->add_subcommand(lines ? "follow" : "wait",
                                        lines ? "Print the training lines of a job until it has ended; its exit code"
                                              : "Wait for the end of a job; its exit code");
    auto job = std::make_shared<std::string>();
    auto flags = std::make_shared<FollowFlags>();
    flags->follow = lines;
    command->add_option("JOB", *job, "Job id or run name")->required();
    AddFollowFlags(command, flags.get(), false);
    command->callback([=] {
      session->action = [=] {
        MBCTL_ASSIGN_OR_FAIL(FollowOptions options, *session, ToFollowOptions(*flags));
        MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
        MBCTL_ASSIGN_OR_FAIL(const v1::Job found, *session, FindJob(client, *job));
        options.throughput = found.resolved().config().logger().log_throughput();
        const int code = FollowJob(session, found.job_id(), options);
        if (!lines && session->format != "table" && code != client::kExitConnectionLost) {
          MBCTL_ASSIGN_OR_FAIL(const v1::Job ended, *session, client->GetJob(found.job_id()));
          session->Print(ended, ended.job_id(), [] { return std::string(); });
        }
        return code;
      };
    });
  }
}

}  // namespace mbridge::mbctl
