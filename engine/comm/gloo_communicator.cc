#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "engine/comm/communicator.h"
#include "engine/comm/file_store.h"
#include "engine/comm/group_part.h"
#include "engine/core/watchdog.h"

namespace mbridge {
namespace {

// An all-reduce is done by chunks of at most this size, to bound the receive buffer.
constexpr size_t kChunkBytes = size_t{4} << 20;
// Below, every rank gets all inputs in one exchange instead of two; the sums are the same.
constexpr size_t kSmallBytes = size_t{32} << 10;

template <class T> struct Accumulator { using type = T; };
template <> struct Accumulator<BFloat16> { using type = float; };

template <class T> auto Load(T x) { return x; }
inline float Load(BFloat16 x) { return ToFloat(x); }
template <class T, class A> T Store(A x) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return ToBFloat16(x);
  else
    return x;
}

// NaN wins, so that no rank loses sight of one.
template <class A> A Max(A a, A b) { return b > a || b != b ? b : a; }

// output[i] = op over rank of parts[rank * stride + i], in rank order. `output` may be one of the parts.
template <class T> void Combine(const T* parts, int64_t stride, int ranks, int64_t count, ReduceOp op, T* output) {
  using A = typename Accumulator<T>::type;
  if (op == ReduceOp::kSum && ranks == 2) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) output[i] = Store<T>(static_cast<A>(Load(parts[i]) + Load(parts[stride + i])));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    A total = Load(parts[i]);
    for (int rank = 1; rank < ranks; ++rank) {
      const A next = Load(parts[rank * stride + i]);
      total = op == ReduceOp::kSum ? static_cast<A>(total + next) : Max<A>(total, next);
    }
    output[i] = Store<T>(total);
  }
}

void CombineAny(DType dtype, const void* parts, int64_t stride, int ranks, int64_t count, ReduceOp op, void* output) {
  const auto run = [&]<class T>(T) { Combine(static_cast<const T*>(parts), stride, ranks, count, op, static_cast<T*>(output)); };
  switch (dtype) {
    case DType::kF32: return run(float{});
    case DType::kBF16: return run(BFloat16{});
    case DType::kF64: return run(double{});
    case DType::kI64: return run(int64_t{});
    default: ThrowEngineError("no reduction of {}", NameOf(dtype));
  }
}

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(const GlooOptions& options)
      : options_(options), timeout_(std::max<int64_t>(1, static_cast<int64_t>(options.timeout_seconds * 1000))) {
    Guarded("rendezvous", [&] {
      const char* address = std::getenv("MB_COMM_ADDRESS");
      auto device = gloo::transport::tcp::CreateDevice(
          gloo::transport::tcp::attr(address != nullptr && *address != '\0' ? address : "127.0.0.1"));
      context_ = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
      context_->setTimeout(timeout_);
      FileStore store(options.directory, options.group, options.timeout_seconds);
      context_->connectFullMesh(store, device);
    });
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  void AllReduce(const Tensor& tensor, ReduceOp op) override {
    Guarded("all-reduce", [&] {
      const size_t width = SizeOf(tensor.dtype);
      const int64_t chunk = static_cast<int64_t>(kChunkBytes / width);
      for (int64_t begin = 0; begin < tensor.size(); begin += chunk) {
        const int64_t count = std::min(chunk, tensor.size() - begin);
        char* data = static_cast<char*>(tensor.data) + static_cast<size_t>(begin) * width;
        if (static_cast<size_t>(count) * width <= kSmallBytes)
          ReduceSmall(data, count, tensor.dtype, op);
        else
          ReduceChunk(data, count, tensor.dtype, op);
      }
    });
  }

  void ReduceScatter(const Tensor& input, const Tensor& output) override {
    RequireParts(output, input, "reduce-scatter");
    Guarded("reduce-scatter", [&] {
      const int64_t count = output.size();
      const size_t part = output.bytes();
      scratch_.resize(part * static_cast<size_t>(size()));
      Exchange(
          input.data, input.bytes(), scratch_.data(), scratch_.size(),
          [&](int peer) {
            return Range{static_cast<size_t>(peer) * part, part};
          },
          [&](int peer) {
            return Range{static_cast<size_t>(peer) * part, part};
          });
      std::memcpy(scratch_.data() + static_cast<size_t>(rank()) * part,
                  static_cast<char*>(input.data) + static_cast<size_t>(rank()) * part, part);
      CombineAny(output.dtype, scratch_.data(), count, size(), count, ReduceOp::kSum, output.data);
    });
  }

  void AllGather(const Tensor& input, const Tensor& output) override {
    RequireParts(input, output, "all-gather");
    Guarded("all-gather", [&] {
      const size_t part = input.bytes();
      char* own = static_cast<char*>(output.data) + static_cast<size_t>(rank()) * part;
      if (own != input.data) std::memmove(own, input.data, part);
      Exchange(
          own, part, output.data, output.bytes(),
          [&](int) {
            return Range{0, part};
          },
          [&](int peer) {
            return Range{static_cast<size_t>(peer) * part, part};
          });
    });
  }

  void Broadcast(const Tensor& tensor, int root) override {
    Guarded("broadcast", [&] {
      const size_t bytes = tensor.bytes();
      Exchange(
          tensor.data, bytes, tensor.data, bytes,
          [&](int) {
            return Range{0, rank() == root ? bytes : 0};
          },
          [&](int peer) {
            return Range{0, peer == root ? bytes : 0};
          });
    });
  }

  void Barrier() override {
    char sent = 1;
    Guarded("barrier", [&] {
      scratch_.resize(static_cast<size_t>(size()));
      Exchange(
          &sent, 1, scratch_.data(), scratch_.size(),
          [](int) {
            return Range{0, 1};
          },
          [](int peer) {
            return Range{static_cast<size_t>(peer), 1};
          });
    });
  }

  std::unique_ptr<Communicator> Split(const std::vector<int>& ranks, const std::string& name) override {
    const GroupPart place = PartOfGroup(options_.group, rank(), size(), ranks, name);
    GlooOptions part = options_;
    part.group = place.group;
    part.rank = place.rank;
    part.size = place.size;
    return MakeGlooCommunicator(part);
  }
  std::unique_ptr<Communicator> Twin(const Context&) override {
    GlooOptions twin = options_;
    twin.group = fmt::format("{}.twin{}", options_.group, ++twins_);
    return MakeGlooCommunicator(twin);
  }

 private:
  struct Range {
    size_t offset, bytes;
  };

  void RequireParts(const Tensor& part, const Tensor& whole, const char* what) const {
    if (part.size() * size() != whole.size() || part.dtype != whole.dtype) {
      ThrowEngineError("{} of {} {} over {} ranks with {} {}", what, NameOf(part.dtype), part.shape.ToString(), size(),
                       NameOf(whole.dtype), whole.shape.ToString());
    }
  }

  // Sends to and receives from every peer what the two functions say; empty ranges are left out. Peers are served in the order
  // rank + 1, rank + 2, …, so that no rank is everyone's first.
  template <class SendRange, class ReceiveRange>
  void Exchange(void* send, size_t send_bytes, void* receive, size_t receive_bytes, SendRange send_range,
                ReceiveRange receive_range) {
    const uint64_t slot = ++sequence_;
    auto out = context_->createUnboundBuffer(send, send_bytes);
    auto in = context_->createUnboundBuffer(receive, receive_bytes);
    int sends = 0, receives = 0;
    for (int step = 1; step < size(); ++step) {
      const int peer = (rank() + size() - step) % size();
      const Range range = receive_range(peer);
      if (range.bytes == 0) continue;
      in->recv(peer, slot, range.offset, range.bytes);
      ++receives;
    }
    for (int step = 1; step < size(); ++step) {
      const int peer = (rank() + step) % size();
      const Range range = send_range(peer);
      if (range.bytes == 0) continue;
      out->send(peer, slot, range.offset, range.bytes);
      ++sends;
    }
    for (; sends > 0; --sends) out->waitSend(timeout_);
    for (; receives > 0; --receives) in->waitRecv(timeout_);
    NoteProgress();
  }

  // Everyone gets everything and combines it.
  void ReduceSmall(char* data, int64_t count, DType dtype, ReduceOp op) {
    const size_t bytes = static_cast<size_t>(count) * SizeOf(dtype);
    scratch_.resize(bytes * static_cast<size_t>(size()));
    Exchange(
        data, bytes, scratch_.data(), scratch_.size(),
        [&](int) {
          return Range{0, bytes};
        },
        [&](int peer) {
          return Range{static_cast<size_t>(peer) * bytes, bytes};
        });
    std::memcpy(scratch_.data() + static_cast<size_t>(rank()) * bytes, data, bytes);
    CombineAny(dtype, scratch_.data(), count, size(), count, op, data);
  }

  // Each rank combines its part of the chunk, then all get all parts.
  void ReduceChunk(char* data, int64_t count, DType dtype, ReduceOp op) {
    const size_t width = SizeOf(dtype);
    const int64_t part = (count + size() - 1) / size();
    const auto range_of = [&](int owner) {
      const int64_t begin = std::min(count, owner * part);
      return Range{static_cast<size_t>(begin) * width, static_cast<size_t>(std::min(count, begin + part) - begin) * width};
    };
    const Range own = range_of(rank());
    const size_t stride = static_cast<size_t>(part) * width;
    scratch_.resize(stride * static_cast<size_t>(size()));
    Exchange(data, static_cast<size_t>(count) * width, scratch_.data(), scratch_.size(), range_of, [&](int peer) {
      return Range{static_cast<size_t>(peer) * stride, own.bytes};
    });
    std::memcpy(scratch_.data() + static_cast<size_t>(rank()) * stride, data + own.offset, own.bytes);
    CombineAny(dtype, scratch_.data(), part, size(), static_cast<int64_t>(own.bytes / width), op, data + own.offset);
    Exchange(
        data, static_cast<size_t>(count) * width, data, static_cast<size_t>(count) * width, [&](int) { return own; }, range_of);
  }

  // Gloo's exceptions become ours. After one the connections are unusable, so every later call fails at once.
  template <class F> void Guarded(const char* what, F&& body) {
    if (broken_)
      throw EngineError(v1::REASON_PEER_LOST,
                        fmt::format("{}: the group {} is broken since an earlier error", what, options_.group));
    const WaitNote note(what, options_.group);
    try {
      body();
    } catch (const EngineError& error) {
      broken_ = true;
      NoteFault(error.reason(), error.what());
      throw;
    } catch (const std::exception& error) {
      broken_ = true;
      const std::string text = error.what();
      const bool timed_out = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
      const v1::Reason reason = timed_out ? v1::REASON_COLLECTIVE_TIMEOUT : v1::REASON_PEER_LOST;
      const std::string late = timed_out ? LateRanks() : "";
      const std::string whole = fmt::format("{} in group {}, rank {} of {}: {}{}{}", what, options_.group, rank(), size(), late,
                                            late.empty() ? "" : ": ", text);
      NoteFault(reason, whole);
      throw EngineError(reason, whole);
    }
  }

  GlooOptions options_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  uint64_t sequence_ = 0;
  int twins_ = 0;
  bool broken_ = false;
  std::vector<char> scratch_;
};

}  // namespace

std::unique_ptr<Communicator> MakeGlooCommunicator(const GlooOptions& options) {
  if (options.rank < 0 || options.rank >= options.size) ThrowEngineError("rank {} of {}", options.rank, options.size);
  if (options.size == 1) return MakeSelfCommunicator();
  // Gloo writes to its sockets without MSG_NOSIGNAL: a peer that has just died would kill this rank too, before it can say why.
  std::signal(SIGPIPE, SIG_IGN);
  return std::make_unique<GlooCommunicator>(options);
}

}  // namespace mbridge
