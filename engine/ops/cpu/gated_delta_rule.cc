#include "engine/ops/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/ops/cpu/precision.h"

namespace mbridge {
namespace {

constexpr float kNormEpsilon = 1e-6f;

int64_t WidthOf(const Tensor& x) { return x.shape[x.shape.rank() - 1]; }

void CheckShapes(const Tensor& qkv, const Tensor& log_decay, const Tensor& beta, const Tensor& output, const Tensor& states,
                 const DeltaLayout& o) {
  const int64_t s = qkv.shape[0], b = qkv.shape[1], rows = s * b;
  const bool fits = WidthOf(qkv) == o.width() && WidthOf(output) == o.value_width() && output.size() == rows * o.value_width() &&
                    log_decay.size() == rows * o.value_heads && beta.size() == log_decay.size() && o.key_heads > 0 &&
                    o.value_heads % o.key_heads == 0;
  const int64_t kept = b * o.value_heads * DeltaChunks(s) * o.key_size * o.value_size;
  if (fits && (states.empty() || states.size() == kept)) return;
  ThrowEngineError("gated delta rule of {} and {} heads: {} with {} to {}, states {}", o.key_heads, o.value_heads,
                   qkv.shape.ToString(), log_decay.shape.ToString(), output.shape.ToString(), states.shape.ToString());
}

// to = x rounded, made unit and multiplied by `scale`; returns what each element was multiplied by.
template <class P> float Unit(const typename P::Storage* x, int64_t n, float scale, float* to) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = P::Load(x[i]);
    sum += to[i] * to[i];
  }
  const float factor = scale / std::sqrt(sum + kNormEpsilon);
  for (int64_t i = 0; i < n; ++i) to[i] *= factor;
  return factor;
}

// dx = the gradient of Unit from that of its result `unit`.
template <class P>
void UnitBackward(const float* d_unit, const float* unit, float factor, float scale, int64_t n, typename P::Storage* dx) {
  float along = 0.0f;
  for (int64_t i = 0; i < n; ++i) along += unit[i] * d_unit[i];
  along /= scale * scale;
  for (int64_t i = 0; i < n; ++i) dx[i] = P::Store(factor * (d_unit[i] - unit[i] * along));
}

// to = S^T x; S [keys, values].
void TransposedTimes(const float* state, const float* x, int64_t keys, int64_t values, float* to) {
  std::fill(to, to + values, 0.0f);
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = state + i * values;
    const float factor = x[i];
#pragma omp simd
    for (int64_t j = 0; j < values; ++j) to[j] += row[j] * factor;
  }
}

// to = S y.
void Times(const float* state, const float* y, int64_t keys, int64_t values, float* to) {
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = state + i * values;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < values; ++j) sum += row[j] * y[j];
    to[i] += sum;
  }
}

// S = S + x y^T.
void AddOuter(float* state, const float* x, const float* y, int64_t keys, int64_t values) {
  for (int64_t i = 0; i < keys; ++i) {
    float* row = state + i * values;
    const float factor = x[i];
#pragma omp simd
    for (int64_t j = 0; j < values; ++j) row[j] += factor * y[j];
  }
}

// One value head's way through a sequence.
template <class P> struct Walk {
  using T = typename P::Storage;
  const DeltaLayout& layout;
  const T* qkv;
  const float *log_decay, *beta;
  int64_t batch, at, value_head;  // Of the head: its sequence.
  std::vector<float> key, query, recalled, error;
  float key_factor = 0.0f, query_factor = 0.0f, query_scale;

  Walk(const DeltaLayout& o, const Tensor& values, const Tensor& decay, const Tensor& strength, int64_t sequence, int64_t head)
      : layout(o),
        qkv(values.as<T>()),
        log_decay(decay.as<float>()),
        beta(strength.as<float>()),
        batch(values.shape[1]),
        at(sequence),
        value_head(head),
        key(o.key_size),
        query(o.key_size),
        recalled(o.value_size),
        error(o.value_size),
        query_scale(1.0f / std::sqrt(static_cast<float>(o.key_size))) {}

  int64_t Row(int64_t t) const { return t * batch + at; }
  float Decay(int64_t t) const { return std::exp(log_decay[Row(t) * layout.value_heads + value_head]); }
  float Beta(int64_t t) const { return beta[Row(t) * layout.value_heads + value_head]; }

  // Reads a token.
  void Read(int64_t t) {
    const int64_t key_head = value_head / layout.values_per_key();
    const T* row = qkv + Row(t) * layout.width();
    key_factor = Unit<P>(row + layout.key_column(key_head), layout.key_size, 1.0f, key.data());
    query_factor = Unit<P>(row + layout.query_column(key_head), layout.key_size, query_scale, query.data());
  }

  // Takes the token that was read into the state, which has decayed; `error` is v - S^T k of before.
  void Correct(int64_t t, float* state) {
    const T* value = qkv + Row(t) * layout.width() + layout.value_column(value_head);
    TransposedTimes(state, key.data(), layout.key_size, layout.value_size, recalled.data());
    const float strength = Beta(t);
    for (int64_t j = 0; j < layout.value_size; ++j) {
      error[j] = P::Load(value[j]) - recalled[j];
      recalled[j] = strength * error[j];
    }
    AddOuter(state, key.data(), recalled.data(), layout.key_size, layout.value_size);
  }
};

void Scale(float* state, float factor, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) state[i] *= factor;
}

void ForwardCpu(const Context&, const Tensor& qkv, const Tensor& log_decay, const Tensor& beta, const DeltaLayout& o,
                DType precision, const Tensor& output, const Tensor& states) {
  CheckShapes(qkv, log_decay, beta, output, states, o);
  const int64_t s = qkv.shape[0], b = qkv.shape[1], size = o.key_size * o.value_size;
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t head = 0; head < b * o.value_heads; ++head) {
      Walk<P> walk(o, qkv, log_decay, beta, head / o.value_heads, head % o.value_heads);
      std::vector<float> state(size), out(o.value_size);
      for (int64_t t = 0; t < s; ++t) {
        if (!states.empty() && t % kDeltaChunk == 0) {
          std::copy(state.begin(), state.end(), states.as<float>() + (head * DeltaChunks(s) + t / kDeltaChunk) * size);
        }
        walk.Read(t);
        Scale(state.data(), walk.Decay(t), size);
        walk.Correct(t, state.data());
        TransposedTimes(state.data(), walk.query.data(), o.key_size, o.value_size, out.data());
        auto* to = output.as<typename P::Storage>() + walk.Row(t) * o.value_width() + walk.value_head * o.value_size;
        for (int64_t j = 0; j < o.value_size; ++j) to[j] = P::Store(out[j]);
      }
    }
  });
}

// Gradients of one value head; those of query and key join d_query and d_key [s, key_size], which value heads share.
template <class P> class HeadBackward {
  using T = typename P::Storage;

 public:
  HeadBackward(const DeltaLayout& layout, const Tensor& d_output, const Tensor& d_qkv, const Tensor& d_log_decay,
               const Tensor& d_beta)
      : o_(layout),
        d_output_(d_output),
        d_qkv_(d_qkv),
        d_log_decay_(d_log_decay),
        d_beta_(d_beta),
        size_(layout.key_size * layout.value_size),
        d_state_(size_),
        chunk_(kDeltaChunk * size_),
        d_out_(layout.value_size),
        d_step_(layout.value_size) {}

  void Run(Walk<P>* walk, const float* states, int64_t s, float* d_query, float* d_key) {
    std::fill(d_state_.begin(), d_state_.end(), 0.0f);
    for (int64_t chunk = DeltaChunks(s) - 1; chunk >= 0; --chunk) {
      const int64_t begin = chunk * kDeltaChunk, end = std::min(begin + kDeltaChunk, s);
      Replay(walk, states + chunk * size_, begin, end);
      for (int64_t t = end - 1; t >= begin; --t) {
        Token(walk, t, chunk_.data() + (t - begin) * size_, d_query + t * o_.key_size, d_key + t * o_.key_size);
      }
    }
  }

 private:
  // chunk_: the decayed state of every token, before its correction.
  void Replay(Walk<P>* walk, const float* first, int64_t begin, int64_t end) {
    const float* before = first;
    std::vector<float> state(size_);
    for (int64_t t = begin; t < end; ++t) {
      float* decayed = chunk_.data() + (t - begin) * size_;
      std::copy(before, before + size_, decayed);
      Scale(decayed, walk->Decay(t), size_);
      std::copy(decayed, decayed + size_, state.begin());
      walk->Read(t);
      walk->Correct(t, state.data());
      before = state.data();
    }
  }

  void Token(Walk<P>* walk, int64_t t, float* state, float* d_query, float* d_key) {
    const int64_t keys = o_.key_size, values = o_.value_size, row = walk->Row(t), gate = row * o_.value_heads + walk->value_head;
    const T* d_output = d_output_.as<T>() + row * o_.value_width() + walk->value_head * values;
    for (int64_t j = 0; j < values; ++j) d_out_[j] = P::Load(d_output[j]);
    walk->Read(t);
    // o = S^T q with S = decayed + k step^T, step = beta error.
    AddOuter(d_state_.data(), walk->query.data(), d_out_.data(), keys, values);
    TransposedTimes(state, walk->key.data(), keys, values, walk->recalled.data());
    const T* value = walk->qkv + row * o_.width() + o_.value_column(walk->value_head);
    const float beta = walk->Beta(t);
    float d_beta = 0.0f, along = 0.0f;
    TransposedTimes(d_state_.data(), walk->key.data(), keys, values, d_step_.data());
    for (int64_t j = 0; j < values; ++j) {
      const float error = P::Load(value[j]) - walk->recalled[j];
      walk->error[j] = beta * error;
      d_beta += d_step_[j] * error;
      along += walk->error[j] * d_out_[j];
    }
    Times(state, d_out_.data(), keys, values, d_query);
    for (int64_t i = 0; i < keys; ++i) d_query[i] += walk->key[i] * along;
    Times(d_state_.data(), walk->error.data(), keys, values, d_key);
    // error = v - decayed^T k.
    T* d_value = d_qkv_.as<T>() + row * o_.width() + o_.value_column(walk->value_head);
    for (int64_t j = 0; j < values; ++j) {
      const float d_error = beta * d_step_[j];
      d_value[j] = P::Store(d_error);
      d_step_[j] = -d_error;
    }
    Times(state, d_step_.data(), keys, values, d_key);
    AddOuter(d_state_.data(), walk->key.data(), d_step_.data(), keys, values);
    // decayed = exp(g) S.
    float d_decay = 0.0f;
#pragma omp simd reduction(+ : d_decay)
    for (int64_t i = 0; i < size_; ++i) d_decay += d_state_[i] * state[i];
    Scale(d_state_.data(), walk->Decay(t), size_);
    d_log_decay_.as<float>()[gate] = d_decay;
    d_beta_.as<float>()[gate] = d_beta;
  }

  const DeltaLayout& o_;
  const Tensor &d_output_, &d_qkv_, &d_log_decay_, &d_beta_;
  const int64_t size_;
  std::vector<float> d_state_, chunk_, d_out_, d_step_;
};

void BackwardCpu(const Context&, const Tensor& d_output, const Tensor& qkv, const Tensor& log_decay, const Tensor& beta,
                 const Tensor& states, const DeltaLayout& o, DType precision, const Tensor& d_qkv, const Tensor& d_log_decay,
                 const Tensor& d_beta) {
  CheckShapes(qkv, log_decay, beta, d_output, states, o);
  CheckShapes(d_qkv, d_log_decay, d_beta, d_output, states, o);
  const int64_t s = qkv.shape[0], b = qkv.shape[1], size = o.key_size * o.value_size;
  cpu::WithPrecision(qkv.dtype, precision, [&]<class P>(P) {
#pragma omp parallel
    {
      HeadBackward<P> backward(o, d_output, d_qkv, d_log_decay, d_beta);
      std::vector<float> d_query(s * o.key_size), d_key(s * o.key_size);
#pragma omp for schedule(dynamic)
      for (int64_t shared = 0; shared < b * o.key_heads; ++shared) {
        const int64_t sequence = shared / o.key_heads, key_head = shared % o.key_heads;
        std::fill(d_query.begin(), d_query.end(), 0.0f);
        std::fill(d_key.begin(), d_key.end(), 0.0f);
        for (int64_t i = 0; i < o.values_per_key(); ++i) {
          const int64_t head = key_head * o.values_per_key() + i;
          Walk<P> walk(o, qkv, log_decay, beta, sequence, head);
          backward.Run(&walk, states.as<float>() + (sequence * o.value_heads + head) * DeltaChunks(s) * size, s, d_query.data(),
                       d_key.data());
        }
        Walk<P> walk(o, qkv, log_decay, beta, sequence, key_head * o.values_per_key());
        for (int64_t t = 0; t < s; ++t) {
          walk.Read(t);
          auto* to = d_qkv.as<typename P::Storage>() + walk.Row(t) * o.width();
          UnitBackward<P>(d_query.data() + t * o.key_size, walk.query.data(), walk.query_factor, walk.query_scale, o.key_size,
                          to + o.query_column(key_head));
          UnitBackward<P>(d_key.data() + t * o.key_size, walk.key.data(), walk.key_factor, 1.0f, o.key_size,
                          to + o.key_column(key_head));
        }
      }
    }
  });
}

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void CheckGates(const Tensor& projected, int64_t column, const Tensor& a_log, const Tensor& dt_bias, const Tensor& gates) {
  const int64_t heads = a_log.size();
  if (dt_bias.size() == heads && column >= 0 && column + 2 * heads <= WidthOf(projected) && heads > 0 &&
      gates.size() == projected.size() / WidthOf(projected) * heads) {
    return;
  }
  ThrowEngineError("gates of {} heads at column {} of {} to {}", heads, column, projected.shape.ToString(),
                   gates.shape.ToString());
}

void GatesForwardCpu(const Context&, const Tensor& projected, int64_t column, const Tensor& a_log, const Tensor& dt_bias,
                     DType precision, const Tensor& log_decay, const Tensor& beta) {
  CheckGates(projected, column, a_log, dt_bias, log_decay);
  CheckGates(projected, column, a_log, dt_bias, beta);
  const int64_t heads = a_log.size(), width = WidthOf(projected), rows = projected.size() / width;
  cpu::WithPrecision(projected.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *log = a_log.as<T>(), *bias = dt_bias.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = projected.as<T>() + row * width + column;
      for (int64_t head = 0; head < heads; ++head) {
        beta.as<float>()[row * heads + head] = P::Round(Sigmoid(P::Load(in[head])));
        log_decay.as<float>()[row * heads + head] =
            -std::exp(P::Load(log[head])) * Softplus(P::Load(in[heads + head]) + P::Load(bias[head]));
      }
    }
  });
}

void GatesBackwardCpu(const Context&, const Tensor& d_log_decay, const Tensor& d_beta, const Tensor& projected, int64_t column,
                      const Tensor& a_log, const Tensor& dt_bias, DType precision, const Tensor& d_projected,
                      const Tensor& a_log_grad, const Tensor& dt_bias_grad) {
  CheckGates(projected, column, a_log, dt_bias, d_log_decay);
  CheckGates(d_projected, column, a_log, dt_bias, d_beta);
  const int64_t heads = a_log.size(), width = WidthOf(projected), rows = projected.size() / width;
  cpu::WithPrecision(projected.dtype, precision, [&]<class P>(P) {
    using T = typename P::Storage;
    const T *log = a_log.as<T>(), *bias = dt_bias.as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < heads; ++head) {
      const float rate = -std::exp(P::Load(log[head]));
      float d_log = 0.0f, d_bias = 0.0f;
      for (int64_t row = 0; row < rows; ++row) {
        const T* in = projected.as<T>() + row * width + column;
        T* to = d_projected.as<T>() + row * WidthOf(d_projected) + column;
        const float strength = Sigmoid(P::Load(in[head])), dt = P::Load(in[heads + head]) + P::Load(bias[head]);
        const float d_decay = d_log_decay.as<float>()[row * heads + head], d_dt = d_decay * rate * Sigmoid(dt);
        to[head] = P::Store(d_beta.as<float>()[row * heads + head] * strength * (1.0f - strength));
        to[heads + head] = P::Store(d_dt);
        d_log += d_decay * rate * Softplus(dt);
        d_bias += d_dt;
      }
      a_log_grad.as<float>()[head] += P::Round(d_log);
      dt_bias_grad.as<float>()[head] += P::Round(d_bias);
    }
  });
}

}  // namespace

Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const DeltaLayout&, DType, const Tensor&, const Tensor&)>
    GatedDeltaRuleForward{&ForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const DeltaLayout&, DType,
        const Tensor&, const Tensor&, const Tensor&)>
    GatedDeltaRuleBackward{&BackwardCpu};
Op<void(const Context&, const Tensor&, int64_t, const Tensor&, const Tensor&, DType, const Tensor&, const Tensor&)>
    DeltaGatesForward{&GatesForwardCpu};
Op<void(const Context&, const Tensor&, const Tensor&, const Tensor&, int64_t, const Tensor&, const Tensor&, DType, const Tensor&,
        const Tensor&, const Tensor&)>
    DeltaGatesBackward{&GatesBackwardCpu};

}  // namespace mbridge
