// One attempt to read a server stream, and the loop that takes a broken stream up again. Internal to client/lib.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <utility>

#include "client/lib/backoff.h"
#include "client/lib/connection.h"
#include "client/lib/grpc_status.h"

namespace mbridge::client {

using Clock = std::chrono::steady_clock;

// What a message did for the reader.
enum class Received {
  kHeartbeat,  // The connection lives.
  kNews,       // Something new was delivered.
  kEnd,        // The end message: the stream is complete.
};

struct StreamAttempt {
  bool complete = false;  // kEnd was seen.
  bool alive = false;     // At least one message came.
  bool news = false;      // At least one kNews.
  Clock::time_point last_message{};
  absl::Status status;  // How the call ended; OK without `complete` is a stream that stopped short.
};

// `start(context, queue)` prepares the async reader. Returns when the call has ended; a call that is silent for longer
// than `silence_limit` is cancelled and reported as UNAVAILABLE.
template <class Response, class Start, class OnMessage>
StreamAttempt ReadStream(std::chrono::milliseconds silence_limit, const std::stop_token& stop, Start start,
                         OnMessage on_message) {
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  StreamAttempt attempt;
  bool silent = false;
  // Waits for the one outstanding operation; false when it failed or was cancelled.
  const auto wait = [&] {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = std::chrono::system_clock::now() + silence_limit;
    if (queue.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::TIMEOUT) {
      silent = true;
      context.TryCancel();
      queue.Next(&tag, &ok);
      return false;
    }
    return ok;
  };
  std::unique_ptr<grpc::ClientAsyncReader<Response>> reader = start(&context, &queue);
  void* const tag = &attempt;
  {
    const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
    reader->StartCall(tag);
    bool ok = wait();
    Response response;
    while (ok && !attempt.complete) {
      response.Clear();
      reader->Read(&response, tag);
      ok = wait();
      if (!ok) break;
      attempt.alive = true;
      attempt.last_message = Clock::now();
      const Received received = on_message(response);
      if (received == Received::kNews) attempt.news = true;
      if (received == Received::kEnd) attempt.complete = true;
    }
    if (attempt.complete) context.TryCancel();
    grpc::Status status;
    reader->Finish(&status, tag);
    void* done = nullptr;
    bool finished = false;
    queue.Next(&done, &finished);
    attempt.status = FromGrpc(status);
  }
  queue.Shutdown();
  void* rest = nullptr;
  for (bool ok = false; queue.Next(&rest, &ok);) {}
  if (silent && !attempt.complete) attempt.status = absl::UnavailableError("no message within the silence limit");
  return attempt;
}

// False when stopped meanwhile.
bool SleepUnlessStopped(std::chrono::milliseconds wait, const std::stop_token& stop);

// True for errors of the connection, false for answers of the server.
bool MayReconnect(const absl::Status& status);

// Repeats `once()` (a StreamAttempt each) until it is complete, until `stop`, until the server refuses, or until
// options.lost_after has passed since the last sign of life. `ok_is_complete`: a stream without an end message
// (history only) is complete when the call ended with OK.
absl::Status ReadUntilComplete(const ConnectionOptions& options, const std::stop_token& stop, bool ok_is_complete,
                               const std::function<StreamAttempt()>& once);

}  // namespace mbridge::client
