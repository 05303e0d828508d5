#include "engine/ops/ssd_scan.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "engine/ops/cpu/precision.h"
#include "engine/ops/cpu/vector_math.h"

namespace mbridge {
namespace {

// Tokens between two kept states in backward: both the kept ones and those of a block are then about sqrt(s).
int64_t BlockLength(int64_t seq_length) { return std::max<int64_t>(1, std::lround(std::sqrt(static_cast<double>(seq_length)))); }

// A thread's scratch, in floats.
struct Layout {
  int64_t state, block, blocks, vectors, shared;

  Layout(const SsdScanOptions& o, int64_t s)
      : state(o.head_dim * o.state_dim),
        block(BlockLength(s)),
        blocks((s + block - 1) / block),
        vectors(2 * o.head_dim + 2 * o.state_dim),
        shared(2 * s * o.state_dim) {}
  // Running state and its gradient, kept states, a block's states, a token's vectors, the thread's share of dB and dC.
  int64_t floats() const { return (2 + blocks + block) * state + vectors + shared; }
};

struct ThreadScratch {
  float *running, *gradient, *kept, *of_block, *x, *dy, *b, *c, *d_b, *d_c;

  ThreadScratch(const Layout& layout, const SsdScanOptions& o, int64_t s, float* memory)
      : running(memory),
        gradient(running + layout.state),
        kept(gradient + layout.state),
        of_block(kept + layout.blocks * layout.state),
        x(of_block + layout.block * layout.state),
        dy(x + o.head_dim),
        b(dy + o.head_dim),
        c(b + o.state_dim),
        d_b(c + o.state_dim),
        d_c(d_b + s * o.state_dim) {}
};

// A head's constants, and what a token makes of dt.
struct HeadConstants {
  float a, d, dt_bias, dt_min, dt_max;
};
struct TimeStep {
  float raw, delta, decay;
  bool bounded;
};

float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

TimeStep TimeStepOf(const HeadConstants& head, float dt) {
  TimeStep step;
  step.raw = dt + head.dt_bias;
  const float free = Softplus(step.raw);
  step.delta = std::max(free, head.dt_min);
  if (head.dt_max > 0.0f) step.delta = std::min(step.delta, head.dt_max);
  step.bounded = step.delta != free;
  step.decay = std::exp(head.a * step.delta);
  return step;
}

// One sequence's view of a head.
template <class P> class Head {
 public:
  using T = typename P::Storage;

  Head(const SsdScanInputs& in, const SsdScanOptions& o, int64_t sequence, int64_t head)
      : o_(o), in_(in), sequence_(sequence), head_(head), group_(head / (o.heads / o.groups)) {
    constants_ = {-std::exp(P::Load(in.a_log.as<T>()[head])), P::Load(in.d.as<T>()[head]), P::Load(in.dt_bias.as<T>()[head]),
                  o.dt_min, o.dt_max};
  }
  const HeadConstants& constants() const { return constants_; }
  int64_t x_column() const { return head_ * o_.head_dim; }
  int64_t b_column() const { return o_.inner_width() + group_ * o_.state_dim; }
  int64_t c_column() const { return b_column() + o_.groups * o_.state_dim; }
  int64_t row(int64_t t) const { return t * o_.batch + sequence_; }

  TimeStep StepAt(int64_t t) const {
    return TimeStepOf(constants_, P::Load(static_cast<const T*>(in_.dt.data)[row(t) * in_.dt.stride + head_]));
  }
  void LoadX(int64_t t, float* to) const { Load(t, x_column(), o_.head_dim, to); }
  void LoadB(int64_t t, float* to) const { Load(t, b_column(), o_.state_dim, to); }
  void LoadC(int64_t t, float* to) const { Load(t, c_column(), o_.state_dim, to); }

  // to = the state after token t from the one before it; they may be the same.
  void Advance(const TimeStep& step, const float* x, const float* b, const float* from, float* to) const {
    const int64_t n = o_.state_dim;
    for (int64_t p = 0; p < o_.head_dim; ++p) {
      const float scaled = step.delta * x[p], decay = step.decay;
      const float* old = from + p * n;
      float* fresh = to + p * n;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) fresh[j] = decay * old[j] + scaled * b[j];
    }
  }

 private:
  void Load(int64_t t, int64_t column, int64_t count, float* to) const {
    const T* from = static_cast<const T*>(in_.xbc.data) + row(t) * in_.xbc.stride + column;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = P::Load(from[j]);
  }

  const SsdScanOptions& o_;
  const SsdScanInputs& in_;
  int64_t sequence_, head_, group_;
  HeadConstants constants_;
};

template <class P>
void HeadForward(const Head<P>& head, const SsdScanOptions& o, int64_t s, const ThreadScratch& scratch, const Tensor& y) {
  const int64_t n = o.state_dim;
  std::fill_n(scratch.running, o.head_dim * n, 0.0f);
  for (int64_t t = 0; t < s; ++t) {
    const TimeStep step = head.StepAt(t);
    head.LoadX(t, scratch.x);
    head.LoadB(t, scratch.b);
    head.LoadC(t, scratch.c);
    head.Advance(step, scratch.x, scratch.b, scratch.running, scratch.running);
    auto* out = y.as<typename P::Storage>() + head.row(t) * o.inner_width() + head.x_column();
    for (int64_t p = 0; p < o.head_dim; ++p) {
      const float* state = scratch.running + p * n;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) sum += state[j] * scratch.c[j];
      out[p] = P::Store(sum + head.constants().d * scratch.x[p]);
    }
  }
}

// Sums over the tokens of a sequence.
struct HeadSums {
  double a_log = 0, d = 0, dt_bias = 0;
};

// Of what a token's step does, by way of its state.
struct TokenGradient {
  float of_delta = 0, of_decay = 0;
};

// `after`, `before`: states of the token and of the one before it. scratch.gradient: of the state after the token from later
// tokens on entry, of the state before it on return. dx [head_dim].
TokenGradient TokenBackward(const SsdScanOptions& o, const TimeStep& step, float d, const float* after, const float* before,
                            const ThreadScratch& scratch, float* d_b, float* d_c, float* dx) {
  const int64_t n = o.state_dim;
  const float *b = scratch.b, *c = scratch.c;
  TokenGradient total;
  for (int64_t p = 0; p < o.head_dim; ++p) {
    const float x = scratch.x[p], dy = scratch.dy[p], scaled = step.delta * x, decay = step.decay;
    const float *h = after + p * n, *old = before + p * n;
    float *g = scratch.gradient + p * n, with_b = 0.0f, with_old = 0.0f;
#pragma omp simd reduction(+ : with_b, with_old)
    for (int64_t j = 0; j < n; ++j) {
      const float of_state = g[j] + dy * c[j];
      d_c[j] += dy * h[j];
      d_b[j] += scaled * of_state;
      with_b += of_state * b[j];
      with_old += of_state * old[j];
      g[j] = decay * of_state;
    }
    dx[p] = step.delta * with_b + d * dy;
    total.of_delta += x * with_b;
    total.of_decay += with_old;
  }
  return total;
}

template <class P> struct BackwardOutputs {
  using T = typename P::Storage;
  const Tensor& dy;
  T* d_xbc;
  int64_t d_xbc_stride;
  T* d_dt;
  int64_t d_dt_stride;
};

template <class P>
HeadSums HeadBackward(const Head<P>& head, const SsdScanOptions& o, int64_t head_index, int64_t s, const Layout& layout,
                      const ThreadScratch& scratch, const BackwardOutputs<P>& out) {
  using T = typename P::Storage;
  const int64_t size = layout.state, n = o.state_dim;
  std::fill_n(scratch.running, size, 0.0f);
  for (int64_t t = 0; t < s; ++t) {
    if (t % layout.block == 0) std::copy_n(scratch.running, size, scratch.kept + t / layout.block * size);
    head.LoadX(t, scratch.x);
    head.LoadB(t, scratch.b);
    head.Advance(head.StepAt(t), scratch.x, scratch.b, scratch.running, scratch.running);
  }
  std::fill_n(scratch.gradient, size, 0.0f);
  HeadSums sums;
  float* dx = scratch.running;  // Free from here on; a state has room for head_dim values.
  for (int64_t block = layout.blocks; block-- > 0;) {
    const int64_t begin = block * layout.block, end = std::min(s, begin + layout.block);
    const float* first = scratch.kept + block * size;
    const auto state = [&](int64_t t) { return t < begin ? first : scratch.of_block + (t - begin) * size; };
    for (int64_t t = begin; t < end; ++t) {
      head.LoadX(t, scratch.x);
      head.LoadB(t, scratch.b);
      head.Advance(head.StepAt(t), scratch.x, scratch.b, state(t - 1), scratch.of_block + (t - begin) * size);
    }
    for (int64_t t = end; t-- > begin;) {
      const TimeStep step = head.StepAt(t);
      head.LoadX(t, scratch.x);
      head.LoadB(t, scratch.b);
      head.LoadC(t, scratch.c);
      const T* dy = out.dy.template as<T>() + head.row(t) * o.inner_width() + head.x_column();
      for (int64_t p = 0; p < o.head_dim; ++p) {
        scratch.dy[p] = P::Load(dy[p]);
        sums.d += scratch.dy[p] * scratch.x[p];
      }
      const TokenGradient token = TokenBackward(o, step, head.constants().d, state(t), state(t - 1), scratch, scratch.d_b + t * n,
                                                scratch.d_c + t * n, dx);
      T* d_x = out.d_xbc + head.row(t) * out.d_xbc_stride + head.x_column();
      for (int64_t p = 0; p < o.head_dim; ++p) d_x[p] = P::Store(dx[p]);
      // decay = exp(a delta), a = -exp(A_log).
      const float of_exponent = step.decay * token.of_decay, a = head.constants().a;
      const float d_delta = token.of_delta + a * of_exponent;
      const float d_dt = step.bounded ? 0.0f : d_delta * cpu::Sigmoid(step.raw);
      sums.a_log += static_cast<double>(step.delta * of_exponent) * a;
      sums.dt_bias += d_dt;
      out.d_dt[head.row(t) * out.d_dt_stride + head_index] = P::Store(d_dt);
    }
  }
  return sums;
}

void CheckShapes(const SsdScanInputs& in, const SsdScanOptions& o, const Tensor& y, const Tensor& workspace, int64_t needed) {
  const bool fits = in.xbc.cols == o.width() && in.dt.cols == o.heads && in.dt.rows == in.xbc.rows &&
                    y.size() == in.xbc.rows * o.inner_width() && in.xbc.rows % o.batch == 0 && o.heads % o.groups == 0;
  if (!fits)
    ThrowEngineError("scan of [{}, {}] and [{}, {}] into {}", in.xbc.rows, in.xbc.cols, in.dt.rows, in.dt.cols,
                     y.shape.ToString());
  if (workspace.size() < needed) ThrowEngineError("scan's workspace has {} bytes of {}", workspace.size(), needed);
}

void ForwardCpu(const Context&, const SsdScanInputs& in, const SsdScanOptions& o, const Tensor& y, const Tensor& workspace) {
  const int64_t s = in.xbc.rows / o.batch;
  const Layout layout(o, s);
  CheckShapes(in, o, y, workspace, SsdScanWorkspaceBytes(o, s, omp_get_max_threads()));
  auto* memory = reinterpret_cast<float*>(workspace.data);
  cpu::WithPrecision(in.xbc.dtype, o.precision, [&]<class P>(P) {
#pragma omp parallel
    {
      const ThreadScratch scratch(layout, o, s, memory + omp_get_thread_num() * layout.floats());
#pragma omp for schedule(static)
      for (int64_t i = 0; i < o.batch * o.heads; ++i) HeadForward(Head<P>(in, o, i / o.heads, i % o.heads), o, s, scratch, y);
    }
  });
}

// Columns of dB and dC of a group: the threads' shares together.
template <class P>
void StoreShared(const Head<P>& of_group, const SsdScanOptions& o, int64_t s, const Layout& layout, const float* memory,
                 int threads, const BackwardOutputs<P>& out) {
  const int64_t n = o.state_dim, shares = layout.floats() - layout.shared;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s; ++t) {
    auto* row = out.d_xbc + of_group.row(t) * out.d_xbc_stride;
    for (int64_t j = 0; j < n; ++j) {
      float b = 0.0f, c = 0.0f;
      for (int thread = 0; thread < threads; ++thread) {
        const float* share = memory + thread * layout.floats() + shares;
        b += share[t * n + j];
        c += share[(s + t) * n + j];
      }
      row[of_group.b_column() + j] = P::Store(b);
      row[of_group.c_column() + j] = P::Store(c);
    }
  }
}

void BackwardCpu(const Context&, const Tensor& dy, const SsdScanInputs& in, const SsdScanOptions& o, const Matrix& d_xbc,
                 const Matrix& d_dt, const SsdScanGradients& gradients, const Tensor& workspace) {
  const int64_t s = in.xbc.rows / o.batch, per_group = o.heads / o.groups;
  const Layout layout(o, s);
  CheckShapes(in, o, dy, workspace, SsdScanWorkspaceBytes(o, s, omp_get_max_threads()));
  auto* sums = reinterpret_cast<HeadSums*>(workspace.data);
  auto* memory = reinterpret_cast<float*>(sums + o.batch * o.heads);
  cpu::WithPrecision(in.xbc.dtype, o.precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const BackwardOutputs<P> out{dy, static_cast<T*>(d_xbc.data), d_xbc.stride, static_cast<T*>(d_dt.data), d_dt.stride};
#pragma omp parallel
    {
      const ThreadScratch scratch(layout, o, s, memory + omp_get_thread_num() * layout.floats());
      for (int64_t i = 0; i < o.batch * o.groups; ++i) {
        const int64_t sequence = i / o.groups, group = i % o.groups;
        std::fill_n(scratch.d_b, layout.shared, 0.0f);
#pragma omp for schedule(static)
        for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
          sums[sequence * o.heads + head] = HeadBackward(Head<P>(in, o, sequence, head), o, head, s, layout, scratch, out);
        }
        StoreShared(Head<P>(in, o, sequence, group * per_group), o, s, layout, memory, omp_get_num_threads(), out);
      }
    }
    for (int64_t head = 0; head < o.heads; ++head) {
      HeadSums total;
      for (int64_t sequence = 0; sequence < o.batch; ++sequence) {
        const HeadSums& part = sums[sequence * o.heads + head];
        total.a_log += part.a_log;
        total.d += part.d;
        total.dt_bias += part.dt_bias;
      }
      gradients.a_log.as<float>()[head] += P::Round(static_cast<float>(total.a_log));
      gradients.d.as<float>()[head] += P::Round(static_cast<float>(total.d));
      gradients.dt_bias.as<float>()[head] += P::Round(static_cast<float>(total.dt_bias));
    }
  });
}

}  // namespace

int64_t SsdScanWorkspaceBytes(const SsdScanOptions& options, int64_t seq_length, int threads) {
  return options.batch * options.heads * static_cast<int64_t>(sizeof(HeadSums)) +
         threads * Layout(options, seq_length).floats() * static_cast<int64_t>(sizeof(float));
}

Op<void(const Context&, const SsdScanInputs&, const SsdScanOptions&, const Tensor&, const Tensor&)> SsdScanForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const SsdScanInputs&, const SsdScanOptions&, const Matrix&, const Matrix&,
        const SsdScanGradients&, const Tensor&)>
    SsdScanBackward{&BackwardCpu};

}  // namespace mbridge
