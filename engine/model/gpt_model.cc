#include "engine/model/gpt_model.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <omp.h>

#include "engine/comm/communicator.h"
#include "engine/core/arena.h"
#include "engine/core/device.h"
#include "engine/core/parameter.h"
#include "engine/core/pass_observer.h"
#include "engine/model/layer_groups.h"
#include "engine/model/microbatch_inputs.h"
#include "engine/model/narrow_linears.h"
#include "engine/model/output_head.h"
#include "engine/model/rotary_tables.h"
#include "engine/model/transformer_layer.h"
#include "engine/model/weights.h"
#include "engine/ops/convert.h"
#include "engine/ops/dropout.h"
#include "engine/ops/embedding.h"
#include "engine/ops/embedding_places.h"
#include "engine/ops/gemm.h"
#include "engine/ops/gradient_sums.h"
#include "engine/ops/loss_sum.h"
#include "engine/ops/scale.h"

namespace mbridge {
namespace {

void CheckIds(const char* what, const int32_t* ids, int64_t count, int64_t end) {
  const auto bad = std::find_if(ids, ids + count, [end](int32_t id) { return id < 0 || id >= end; });
  if (bad == ids + count) return;
  throw EngineError(v1::REASON_DATA_ERROR,
                    fmt::format("{} {} at place {} of the microbatch: 0 to {}", what, *bad, bad - ids, end - 1));
}

// Everything that a microbatch writes, allocated once.
struct Activations {
  std::vector<LayerRecord> layers;
  std::vector<LayerGroup> groups;
  size_t kept_bytes = 0;  // Of the arena: what backward reads. The rest is scratch.
  Tensor embedding_keep;  // U8 [stream length, b, h], empty without dropout.
  Tensor last_hidden;     // [stream length, b, h]: output of the last layer.
  NormRecord final_norm;
  Tensor normed;                                      // [stream length, b, h]: input of the output layer.
  Tensor gradient;                                    // [stream length, b, h]: of the residual stream.
  Tensor whole_sequence;                              // [s, b, h], with sequence parallelism.
  Tensor local_tokens, local_labels;                  // I32 [b, s]: places in this rank's words, -1: another rank's.
  Tensor stream_rows, stream_positions;               // I32 [b, stream length]: places in the stream, position ids.
  Tensor touched_words, touched_positions, gathered;  // Of EmbeddingBackward.
  Tensor rotary_cosine, rotary_sine;                  // [s, RotaryWidth / 2], with rotary positions.
  Tensor rotary_local_cosine, rotary_local_sine;      // The same, with rotary_base_local.
  Tensor loss_totals;                                 // F64 [2]: sums of loss * mask and of the mask since they were taken.
  LayerScratch layer_scratch;
  OutputHeadScratch head;

  // The layers' records; `again` is shared by what is recomputed.
  void AllocateLayers(Arena* arena, Arena* again, const Step& step) {
    const Shape stream_shape{step.stream_length(), step.micro_batch_size, step.config->hidden_size};
    groups = GroupsOf(*step.config);
    for (const LayerGroup& group : groups) {
      again->Reset();
      for (int64_t i = group.begin; i < group.end; ++i) {
        if (!group.again) again->Reset();
        const Tensor input = (group.again && i > group.begin ? again : arena)->Allocate(step.storage, stream_shape);
        layers.push_back(LayerRecord::Allocate(group.again ? again : arena, again, step, i));
        LayerRecord& record = layers.back();
        record.input = input;
        for (Tensor* sum : {&record.moe.load, &record.moe.balance_loss}) {
          if (group.again && sum->shape.rank() > 0) *sum = arena->Allocate(sum->dtype, sum->shape);
        }
      }
    }
  }

  static Activations Allocate(Arena* arena, Arena* again, const Step& step) {
    const GptConfig& c = *step.config;
    const int64_t s = step.seq_length, b = step.micro_batch_size, h = c.hidden_size;
    const Shape stream_shape{step.stream_length(), b, h};
    Activations a;
    if (c.hidden_dropout > 0.0) a.embedding_keep = arena->Allocate(DType::kU8, stream_shape);
    a.AllocateLayers(arena, again, step);
    a.last_hidden = arena->Allocate(step.storage, stream_shape);
    a.final_norm = NormRecord::Allocate(arena, step);
    a.normed = arena->Allocate(step.storage, stream_shape);
    a.kept_bytes = arena->Mark();
    a.gradient = arena->Allocate(step.storage, stream_shape);
    if (step.tensor_parallel.sequence_parallel) a.whole_sequence = arena->Allocate(step.storage, {s, b, h});
    if (step.tensor_parallel.size() > 1) {
      a.local_tokens = arena->Allocate(DType::kI32, {b, s});
      a.local_labels = arena->Allocate(DType::kI32, {b, s});
      a.stream_rows = arena->Allocate(DType::kI32, {b, step.stream_length()});
      a.stream_positions = arena->Allocate(DType::kI32, {b, step.stream_length()});
    }
    a.touched_words = arena->Allocate(DType::kI32, {c.padded_vocab_size});
    a.touched_positions = arena->Allocate(DType::kI32, {std::max<int64_t>(c.max_position_embeddings, 1)});
    if (c.position_embedding == PositionKind::kRope) {
      a.rotary_cosine = arena->Allocate(DType::kF32, {s, RotaryWidth(c) / 2});
      a.rotary_sine = arena->Allocate(DType::kF32, {s, RotaryWidth(c) / 2});
      if (c.rotary_base_local > 0) {
        a.rotary_local_cosine = arena->Allocate(DType::kF32, {s, RotaryWidth(c) / 2});
        a.rotary_local_sine = arena->Allocate(DType::kF32, {s, RotaryWidth(c) / 2});
      }
    }
    a.gathered = arena->Allocate(DType::kF32, {s * b, h});
    a.loss_totals = arena->Allocate(DType::kF64, {2});
    a.layer_scratch = LayerScratch::Allocate(arena, step, omp_get_max_threads());
    for (LayerRecord& layer : a.layers) layer.ShareScratch(step, a.layer_scratch);
    a.head = OutputHeadScratch::Allocate(arena, step);
    return a;
  }
};

}  // namespace

struct GptModel::Impl {
  GptConfig config, share;  // Of the whole model, of this rank.
  TensorParallel tensor_parallel;
  Context context;
  DType storage;
  int word_table = -1, position_table = -1, output_table = -1;
  std::vector<LayerParameters> layers;
  std::vector<int> first_parameters;  // Of each layer, of what follows the last one.
  int parameter_count = 0;
  Norm final_norm;
  std::vector<InitRule> rules;  // By parameter index.

  std::unique_ptr<NarrowLinears> narrow = std::make_unique<NarrowLinears>();
  Weights weights;
  Arena arena = Arena::Planning(), again = Arena::Planning();
  Activations activations;
  MicrobatchInputs inputs;
  int64_t micro_batch_size = 0;
  PassObserver* observer = nullptr;

  // A CUDA graph and what it was recorded for.
  struct Recording {
    Device::Graph graph;
    float grad_scale = 0;
    size_t batches = 0;
    uint64_t default_advance = 0, model_parallel_advance = 0;  // Of the streams.
  };
  Graphs graphs = Graphs::kNone;
  int64_t calls_before_graphs = 0;
  Recording recording;

  // How a parameter is split over the tensor-parallel ranks.
  struct Split {
    int axis = -1;
    std::vector<int64_t> stripes = {};
    bool partial_gradient = false;
  };

  // `shape` of this rank's shard.
  int Declare(ParameterStore* store, std::string name, const Shape& shape, const InitRule& rule, const Split& split,
              bool trainable = true) {
    ParameterSpec spec{
        .name = std::move(name), .shape = shape, .global_shape = shape, .trainable = trainable, .weight_decay = shape.rank() > 1};
    if (tensor_parallel.size() > 1) {
      spec.partial_gradient = split.partial_gradient;
      if (split.axis >= 0) {
        spec.shard_axis = split.axis;
        spec.stripes = split.stripes;
        spec.shard_begin = tensor_parallel.rank() * (split.stripes.empty() ? shape[split.axis] : split.stripes[0]);
        spec.global_shape[split.axis] *= tensor_parallel.size();
      }
    }
    rules.push_back(rule);
    return store->Add(std::move(spec));
  }

  InitRule GammaRule() const { return {InitRule::Kind::kConstant, config.layernorm_zero_centered_gamma ? 0.0f : 1.0f}; }

  // A parameter of the residual stream: whole on every rank; with sequence parallelism each rank sees some of its gradient.
  Split OfStream() const { return {.partial_gradient = tensor_parallel.sequence_parallel}; }

  Norm DeclareNorm(ParameterStore* store, const std::string& name) {
    const int gamma = Declare(store, name + ".weight", {config.hidden_size}, GammaRule(), OfStream());
    if (config.normalization == NormKind::kRmsNorm) return {.gamma = gamma};
    return {.gamma = gamma, .beta = Declare(store, name + ".bias", {config.hidden_size}, {}, OfStream())};
  }

  // out and in of this rank; `halves`: of a layer split by columns, each half is.
  Linear DeclareLinear(ParameterStore* store, const std::string& name, int64_t out, int64_t in, double std, LinearSplit kind,
                       bool add_bias = false, bool halves = false) {
    const bool columns = kind == LinearSplit::kColumns;
    Split of_weight{.axis = columns ? 0 : 1};
    if (halves) of_weight.stripes = {out / 2, out / 2};
    Linear linear{.split = kind};
    linear.weight =
        Declare(store, name + ".weight", {out, in}, {InitRule::Kind::kModelParallelNormal, static_cast<float>(std)}, of_weight);
    if (config.add_bias_linear || add_bias) {
      linear.bias = Declare(store, name + ".bias", {out}, {}, columns ? of_weight : OfStream());
    }
    return linear;
  }

  // The linear layers of attention and plain MLP in 8 or 4 bits, where the layer's are.
  void MakeNarrow(const ParameterStore& store, LayerParameters* p) {
    if (!IsLowPrecisionLayer(share, p->layer)) return;
    std::vector<Linear*> linears;
    if (HasAttention(share, p->layer)) linears = {&p->qkv, &p->proj};
    if (HasMlp(share, p->layer)) linears.insert(linears.end(), {&p->fc1, &p->fc2});
    for (Linear* linear : linears) {
      if (linear->weight < 0) continue;
      const ParameterSpec& spec = store[linear->weight].spec;
      linear->narrow = narrow->Add(spec.name, linear->weight, spec.shape[0], spec.shape[1]);
    }
  }

  // Declares what a module asks for.
  auto DeclareFor(ParameterStore* store) {
    return [this, store](const ParameterDeclaration& parameter) {
      const Split split{.axis = parameter.axis,
                        .stripes = parameter.stripes,
                        .partial_gradient = parameter.of_stream && tensor_parallel.sequence_parallel};
      return Declare(store, parameter.name, parameter.shape, parameter.rule, split, parameter.trainable);
    };
  }

  void DeclareAttention(ParameterStore* store, const std::string& prefix, LayerParameters* p) {
    const GptConfig& c = share;
    const int64_t q = c.num_attention_heads * c.kv_channels, kv = c.num_query_groups * c.kv_channels;
    p->proj = DeclareLinear(store, prefix + "self_attention.linear_proj", c.hidden_size, ContextWidth(c), OutputInitStd(c),
                            LinearSplit::kRows, c.add_attention_output_bias);
    if (c.post_layernorm) p->attention_post_norm = DeclareNorm(store, prefix + "self_attention.linear_proj.post_layernorm");
    if (c.attention_sinks) {
      p->sinks = DeclareFor(store)({.name = prefix + "self_attention.core_attention.softmax_offset",
                                    .shape = {c.num_attention_heads},
                                    .rule = {InitRule::Kind::kModelParallelNormal, static_cast<float>(c.init_method_std)},
                                    .axis = 0});
    }
    if (c.multi_latent_attention) {
      p->mla = DeclareMla(c, prefix + "self_attention.", DeclareFor(store));
    } else {
      p->qkv = DeclareLinear(store, prefix + "self_attention.linear_qkv", QkvWidth(c), c.hidden_size, c.init_method_std,
                             LinearSplit::kColumns, c.add_qkv_bias);
    }
    if (c.qk_layernorm && !c.multi_latent_attention) {
      const bool whole = c.qk_norm_over_projection;
      // Each rank has some of the heads: of the gammas, or of the rows of one gamma's gradient.
      const Split of_heads = whole ? Split{.axis = 0} : Split{.partial_gradient = true};
      p->query_gamma =
          Declare(store, prefix + "self_attention.q_layernorm.weight", {whole ? q : c.kv_channels}, GammaRule(), of_heads);
      p->key_gamma =
          Declare(store, prefix + "self_attention.k_layernorm.weight", {whole ? kv : c.kv_channels}, GammaRule(), of_heads);
    }
  }

  void DeclareMlp(ParameterStore* store, const std::string& prefix, LayerParameters* p) {
    const GptConfig& c = share;
    if (c.pre_layernorm) p->mlp_norm = DeclareNorm(store, prefix + "pre_mlp_layernorm");
    if (IsMoeLayer(c, p->layer)) {
      p->moe = DeclareMoe(c, prefix + "mlp.", DeclareFor(store));
    } else {
      p->fc1 = DeclareLinear(store, prefix + "mlp.linear_fc1", Fc1Width(c), c.hidden_size, c.init_method_std,
                             LinearSplit::kColumns, c.add_mlp_bias, IsGated(c.activation));
      p->fc2 = DeclareLinear(store, prefix + "mlp.linear_fc2", c.hidden_size, c.ffn_hidden_size, OutputInitStd(c),
                             LinearSplit::kRows, c.add_mlp_bias);
    }
    if (c.post_layernorm) p->mlp_post_norm = DeclareNorm(store, prefix + "mlp.linear_fc2.post_layernorm");
  }

  LayerParameters DeclareLayer(ParameterStore* store, int64_t layer) {
    const std::string prefix = fmt::format("decoder.layers.{}.", layer);
    const GptConfig& c = share;
    const MixerKind mixer = MixerOf(c, layer);
    LayerParameters p;
    p.layer = layer;
    p.has_mixer = mixer != MixerKind::kNone;
    p.has_mlp = HasMlp(c, layer);
    const char* norm = mixer == MixerKind::kMamba2 ? "norm" : "input_layernorm";
    if (c.pre_layernorm && p.has_mixer) p.input_norm = DeclareNorm(store, prefix + norm);
    if (HasMamba(c, layer)) p.mamba = DeclareMamba(c, prefix + "mixer.", DeclareFor(store));
    if (HasGatedDelta(c, layer)) p.delta = DeclareGatedDelta(c, prefix + "self_attention.", DeclareFor(store));
    if (HasAttention(c, layer)) DeclareAttention(store, prefix, &p);
    if (p.has_mlp) DeclareMlp(store, prefix, &p);
    return p;
  }

  Step StepFor(RngStreams* streams) const { return StepFor(streams, micro_batch_size); }
  Step StepFor(RngStreams* streams, int64_t batch) const {
    TensorParallel parallel = tensor_parallel;
    parallel.whole_sequence = activations.whole_sequence;
    return {.context = context,
            .config = &share,
            .precision = config.dtype,
            .storage = storage,
            .seq_length = config.seq_length,
            .micro_batch_size = batch,
            .rotary_cosine = activations.rotary_cosine,
            .rotary_sine = activations.rotary_sine,
            .rotary_local_cosine = activations.rotary_local_cosine,
            .rotary_local_sine = activations.rotary_local_sine,
            .tensor_parallel = parallel,
            .narrow = narrow->empty() ? nullptr : narrow.get(),
            .streams = streams};
  }

  // Before parameters below `end` are read, and after their gradients from `first` on have been added to.
  void Need(int end) {
    if (observer != nullptr) observer->BeforeUse(end);
    weights.RefreshBelow(end);
  }
  void Added(int first) const {
    if (observer != nullptr) observer->GradientsAdded(first);
  }
  void ScaleEmbeddings(const Step& step, const Tensor& x) const;
  void Embed(const Step& step, const DeviceMicrobatch& batch);
  void EmbedBackward(const Step& step, const DeviceMicrobatch& batch);
  void Forward(const Step& step, const DeviceMicrobatch& batch);
  void Again(const Step& step, const LayerGroup& group);
  void Backward(const Step& step, const DeviceMicrobatch& batch);
  void AddHeadGradient(const Step& step) const;
  // From the batch to its loss, which joins loss_totals; `grad_scale` 0 in evaluation.
  void ForwardToLoss(const Step& step, const DeviceMicrobatch& batch, float grad_scale);
  void RunBatch(const HostMicrobatch& batch, float grad_scale, RngStreams* streams);
  void Replay(std::span<const HostMicrobatch> batches, float grad_scale, RngStreams* streams);
  void FillTable(const GptConfig& table_config, const Tensor& cosine, const Tensor& sine) const;
  void CheckBatch(const HostMicrobatch& batch) const;
};

// Embeddings after their dropout, or their gradient, times embedding_multiplier.
void GptModel::Impl::ScaleEmbeddings(const Step& step, const Tensor& x) const {
  if (config.embedding_multiplier == 1.0) return;
  auto factor = static_cast<float>(config.embedding_multiplier);
  const Tensor view{&factor, DType::kF32, DeviceType::kCpu, {1}};
  Convert({}, view, step.precision, view);
  Scale(step.context, x, factor, step.precision, x);
}

// The layers' input. With several ranks each looks up its own words; their sum gets positions and dropout.
void GptModel::Impl::Embed(const Step& step, const DeviceMicrobatch& batch) {
  Activations& a = activations;
  const int64_t b = step.micro_batch_size, length = step.stream_length();
  Tensor keep;
  if (step.training() && config.hidden_dropout > 0.0) {
    keep = a.embedding_keep;
    DrawEagerMask(step, step.hidden_dropout_stream(), config.hidden_dropout, keep);
  }
  const Tensor& words = weights.value(word_table);
  const Tensor positions = position_table < 0 ? Tensor() : weights.value(position_table), stream = a.layers[0].input;
  if (step.tensor_parallel.size() == 1) {
    EmbeddingForward(step.context, batch.tokens, batch.position_ids, words, positions, keep, config.hidden_dropout,
                     step.precision, stream);
    return;
  }
  const int64_t vocabulary = share.padded_vocab_size;
  LocalPlaces(step.context, batch.tokens, step.tensor_parallel.rank() * vocabulary, vocabulary, a.local_tokens);
  const Tensor partial = PartialSum(step, stream);
  EmbeddingForward(step.context, a.local_tokens, {}, words, {}, {}, 0.0, step.precision, partial);
  SumPartial(step, partial, stream);
  if (positions.empty() && keep.empty()) return;
  const int64_t first_row = step.tensor_parallel.sequence_parallel ? step.tensor_parallel.rank() * length : 0;
  StreamPlaces(step.context, batch.position_ids, first_row, a.stream_rows, a.stream_positions);
  EmbeddingForward(step.context, a.stream_rows, a.stream_positions, stream.View({length * b, config.hidden_size}), positions,
                   keep, config.hidden_dropout, step.precision, stream);
}

// Embedding, layers, final norm.
void GptModel::Impl::Forward(const Step& step, const DeviceMicrobatch& batch) {
  Activations& a = activations;
  Need(first_parameters[0]);
  Embed(step, batch);
  ScaleEmbeddings(step, a.layers[0].input);
  OpenSum open;
  for (LayerGroup& group : a.groups) {
    if (step.training()) {
      group.default_stream = step.streams->default_stream;
      group.model_parallel = step.streams->model_parallel;
    }
    for (int64_t i = group.begin; i < group.end; ++i) {
      const Tensor& output = i + 1 < config.num_layers ? a.layers[i + 1].input : a.last_hidden;
      Need(first_parameters[static_cast<size_t>(i) + 1]);
      // The next such group's records lie in the memory of this one's.
      const bool closed = group.again && i + 1 == group.end;
      OpenSum* const leaving = closed ? nullptr : &open;
      TransformerLayerForward(step, layers[i], weights, a.layer_scratch, &a.layers[i], output, std::exchange(open, {}), leaving);
    }
  }
  Need(parameter_count);
  final_norm.ForwardOfSum(step, weights, open, a.last_hidden, a.final_norm, a.normed);
}

// The activations of a group from the input of its first layer, dropout masks included.
void GptModel::Impl::Again(const Step& step, const LayerGroup& group) {
  Activations& a = activations;
  const PhiloxStream default_stream = step.streams->default_stream, model_parallel = step.streams->model_parallel;
  step.streams->default_stream = group.default_stream;
  step.streams->model_parallel = group.model_parallel;
  OpenSum open;
  for (int64_t i = group.begin; i < group.end; ++i) {
    TransformerLayerAgain(step, layers[i], weights, a.layer_scratch, a.layers[i],
                          i + 1 < group.end ? a.layers[i + 1].input : Tensor(), std::exchange(open, {}),
                          i + 1 < group.end ? &open : nullptr);
  }
  step.streams->default_stream = default_stream;
  step.streams->model_parallel = model_parallel;
}

// From the output head's gradients to the embedding's.
void GptModel::Impl::Backward(const Step& step, const DeviceMicrobatch& batch) {
  Activations& a = activations;
  const Tensor head_grad = PartialSum(step, a.gradient);
  Convert(step.context, a.head.input_grad.View(head_grad.shape), step.precision, head_grad);
  SumPartial(step, head_grad, a.gradient);
  final_norm.Backward(step, weights, a.gradient, a.last_hidden, a.final_norm, {}, a.gradient,
                      StreamGradientMaximum(step, a.gradient));
  if (!config.tied_embeddings) AddHeadGradient(step);
  Added(first_parameters.back());
  bool newest = true;  // The last group's activations are still there from forward.
  for (size_t g = a.groups.size(); g-- > 0;) {
    const LayerGroup& group = a.groups[g];
    if (group.again && !std::exchange(newest, false)) Again(step, group);
    for (int64_t i = group.end; i-- > group.begin;) {
      TransformerLayerBackward(step, layers[i], weights, a.layer_scratch, a.layers[i], a.gradient);
      Added(first_parameters[static_cast<size_t>(i)]);
    }
  }
  ScaleEmbeddings(step, a.gradient);
  if (config.hidden_dropout > 0.0) {
    Dropout(step.context, a.gradient, a.embedding_keep, config.hidden_dropout, step.precision, a.gradient);
  }
  EmbedBackward(step, batch);
  if (config.tied_embeddings) AddHeadGradient(step);
  Added(0);
}

// Of the output layer's weight, where the product has not added it itself.
void GptModel::Impl::AddHeadGradient(const Step& step) const {
  if (step.fuse_gradients()) return;
  AddGradient(step.context, activations.head.weight_grad, step.precision, weights.main_grad(output_table));
}

// From a.gradient to the tables' gradients; those of tied words join the output layer's.
void GptModel::Impl::EmbedBackward(const Step& step, const DeviceMicrobatch& batch) {
  Activations& a = activations;
  const Tensor gradient = GatherSequence(step, a.gradient);
  if (position_table >= 0) {
    EmbeddingBackward(step.context, batch.position_ids, gradient, step.precision, EmbeddingSum::kMainGradient,
                      weights.main_grad(position_table), a.touched_positions, a.gathered);
  }
  const bool join = config.tied_embeddings && !step.fuse_gradients();
  EmbeddingBackward(step.context, a.local_tokens.empty() ? batch.tokens : a.local_tokens, gradient, step.precision,
                    join ? EmbeddingSum::kTiedGradient : EmbeddingSum::kMainGradient,
                    join ? a.head.weight_grad : weights.main_grad(word_table), a.touched_words, a.gathered);
}

void GptModel::Impl::ForwardToLoss(const Step& step, const DeviceMicrobatch& batch, float grad_scale) {
  Activations& a = activations;
  Tensor labels = batch.labels;
  if (step.tensor_parallel.size() > 1) {
    labels = a.local_labels;
    LocalPlaces(step.context, batch.labels, step.tensor_parallel.rank() * share.padded_vocab_size, share.padded_vocab_size,
                labels);
  }
  SetTargets(step.context, labels, batch.loss_mask, grad_scale, a.head.labels, a.head.weight);
  Forward(step, batch);
  OutputHeadRun(step, GatherSequence(step, a.normed), weights.value(output_table),
                step.fuse_gradients() ? weights.main_grad(output_table) : a.head.weight_grad, a.head);
  AddLossSums(step.context, a.head.loss, batch.loss_mask, a.loss_totals);
}

void GptModel::Impl::RunBatch(const HostMicrobatch& host, float grad_scale, RngStreams* streams) {
  Step step = StepFor(streams);
  step.grad_scale = grad_scale;
  const DeviceMicrobatch batch = inputs.Upload(host);
  ForwardToLoss(step, batch, grad_scale);
  Backward(step, batch);
}

// The graph reads the batches at fixed addresses, and there too where the streams stand.
void GptModel::Impl::Replay(std::span<const HostMicrobatch> batches, float grad_scale, RngStreams* streams) {
  Need(parameter_count);  // Nothing to wait for inside the graph.
  Device& device = DeviceOf(context.device);
  PhiloxStream &first = streams->default_stream, &second = streams->model_parallel;
  const MicrobatchInputs::Words words = {first.seed, first.offset, second.seed, second.offset};
  std::vector<DeviceMicrobatch> uploaded;
  for (size_t i = 0; i < batches.size(); ++i) uploaded.push_back(inputs.Upload(batches[i], static_cast<int>(i), words));
  if (recording.graph.executable != nullptr && recording.grad_scale == grad_scale && recording.batches == batches.size()) {
    first.offset += recording.default_advance;
    second.offset += recording.model_parallel_advance;
  } else {
    recording = {};
    const RecordedStreams recorded{inputs.WordsAt(0), first.offset, second.offset};
    Step step = StepFor(streams);
    step.grad_scale = grad_scale;
    step.recorded = &recorded;
    device.BeginRecording(context);
    try {
      for (const DeviceMicrobatch& batch : uploaded) {
        ForwardToLoss(step, batch, grad_scale);
        Backward(step, batch);
      }
    } catch (...) {
      device.DropRecording(context);
      throw;
    }
    recording = {device.EndRecording(context), grad_scale, batches.size(), first.offset - words[1], second.offset - words[3]};
  }
  device.Launch(context, recording.graph);
}

void GptModel::Impl::FillTable(const GptConfig& table_config, const Tensor& cosine, const Tensor& sine) const {
  std::vector<float> host(static_cast<size_t>(2 * cosine.size()));
  const Tensor host_cosine{host.data(), DType::kF32, DeviceType::kCpu, cosine.shape};
  const Tensor host_sine{host.data() + cosine.size(), DType::kF32, DeviceType::kCpu, sine.shape};
  FillRotaryTables(table_config, host_cosine, host_sine);
  Device& device = DeviceOf(context.device);
  device.CopyToDevice(context, cosine.data, host_cosine.data, cosine.bytes());
  device.CopyToDevice(context, sine.data, host_sine.data, sine.bytes());
  device.Synchronize(context);
}

void GptModel::Impl::CheckBatch(const HostMicrobatch& batch) const {
  if (micro_batch_size == 0) ThrowEngineError("the model ran before Prepare");
  const int64_t count = micro_batch_size * config.seq_length;
  CheckIds("token id", batch.tokens, count, config.padded_vocab_size);
  if (batch.labels != nullptr) CheckIds("label", batch.labels, count, config.padded_vocab_size);
  if (position_table >= 0) CheckIds("position id", batch.position_ids, count, config.max_position_embeddings);
}

GptModel::GptModel(const GptConfig& config, Communicator* tensor_parallel, const Context& context)
    : impl_(std::make_unique<Impl>()) {
  ValidateGptConfig(config);
  if (context.device == DeviceType::kCuda) RequireCudaParts(config);
  impl_->config = config;
  impl_->context = context;
  impl_->tensor_parallel.group = tensor_parallel;
  const int ranks = impl_->tensor_parallel.size();
  impl_->tensor_parallel.sequence_parallel = config.sequence_parallel && ranks > 1;
  impl_->share = ShareOf(config, ranks);
  const bool narrow = context.device != DeviceType::kCpu || (config.dtype == DType::kBF16 && NativeBF16Products());
  impl_->storage = narrow ? config.dtype : DType::kF32;
}

GptModel::~GptModel() = default;

void GptModel::DeclareParameters(ParameterStore* store) {
  Impl& m = *impl_;
  const GptConfig& c = m.share;
  if (store->dtype() != c.dtype) ThrowEngineError("parameters of {} for a model of {}", NameOf(store->dtype()), NameOf(c.dtype));
  if (!store->parameters().empty()) ThrowEngineError("the model's parameters come first");
  m.rules.clear();
  m.narrow = std::make_unique<NarrowLinears>(c.low_precision, m.context, m.storage);
  m.layers.clear();
  const auto embedding_std = static_cast<float>(EmbeddingInitStd(c));
  m.word_table = m.Declare(store, "embedding.word_embeddings.weight", {c.padded_vocab_size, c.hidden_size},
                           {InitRule::Kind::kModelParallelNormal, embedding_std}, {.axis = 0});
  if (c.position_embedding == PositionKind::kLearnedAbsolute) {
    m.position_table = m.Declare(store, "embedding.position_embeddings.weight", {c.max_position_embeddings, c.hidden_size},
                                 {InitRule::Kind::kCpuEmbedding, embedding_std}, {});
  }
  m.first_parameters.clear();
  const auto declared = [store] { return static_cast<int>(store->parameters().size()); };
  for (int64_t i = 0; i < c.num_layers; ++i) {
    m.first_parameters.push_back(declared());
    m.layers.push_back(m.DeclareLayer(store, i));
    m.MakeNarrow(*store, &m.layers.back());
  }
  m.first_parameters.push_back(declared());
  m.final_norm = m.DeclareNorm(store, "decoder.final_layernorm");
  m.output_table = c.tied_embeddings
                       ? m.word_table
                       : m.Declare(store, "output_layer.weight", {c.padded_vocab_size, c.hidden_size},
                                   {InitRule::Kind::kModelParallelNormal, static_cast<float>(c.init_method_std)}, {.axis = 0});
  m.parameter_count = declared();
}

void GptModel::InitializeWeights(ParameterStore* store, RngStreams* streams) {
  const std::vector<InitRule>& rules = impl_->rules;
  std::vector<int> order(rules.size());
  std::iota(order.begin(), order.end(), 0);
  for (auto begin = order.begin(); begin != order.end();) {
    const auto end = std::find_if(begin, order.end(), [&](int i) { return rules[i].kind != rules[*begin].kind; });
    std::stable_sort(begin, end, [&](int a, int b) { return rules[a].turn < rules[b].turn; });
    begin = end;
  }
  for (const int i : order) {
    // What the tensor-parallel ranks hold alike they draw alike.
    const bool alike = impl_->tensor_parallel.size() > 1 && (*store)[i].spec.shard_axis < 0;
    InitRule rule = rules[i];
    if (alike && rule.kind == InitRule::Kind::kModelParallelNormal) rule.kind = InitRule::Kind::kReplicatedNormal;
    InitializeParameter(impl_->context, rule, (*store)[i].value, streams);
  }
}

void GptModel::Prepare(const ParameterStore& store, int micro_batch_size) {
  Impl& m = *impl_;
  if (micro_batch_size < 1) ThrowEngineError("micro batch size {}", micro_batch_size);
  m.micro_batch_size = micro_batch_size;
  m.weights = Weights(&store, m.storage);
  m.narrow->Prepare(m.config.seq_length * micro_batch_size);
  m.narrow->OnWeightsChanged(m.weights);
  Arena plan = Arena::Planning(m.context.device), plan_again = Arena::Planning(m.context.device);
  Activations::Allocate(&plan, &plan_again, m.StepFor(nullptr));
  m.arena = Arena(plan.peak(), m.context.device);
  m.again = Arena(plan_again.peak(), m.context.device);
  m.activations = Activations::Allocate(&m.arena, &m.again, m.StepFor(nullptr));
  for (int64_t layer = 0; layer < m.share.num_layers; ++layer) {
    if (!HasAttention(m.share, layer)) continue;
    PrepareCoreAttention(m.StepFor(nullptr), AttentionOptionsOf(m.StepFor(nullptr), layer));
  }
  m.inputs = MicrobatchInputs(m.context, micro_batch_size, m.config.seq_length);
  m.recording = {};
  Activations& a = m.activations;
  if (!a.rotary_cosine.empty()) {
    m.FillTable(m.config, a.rotary_cosine, a.rotary_sine);
    if (m.config.rotary_base_local > 0) {
      m.FillTable(LocalRotaryConfig(m.config), a.rotary_local_cosine, a.rotary_local_sine);
    }
  }
  DeviceOf(m.context.device).Zero(m.context, a.loss_totals.data, a.loss_totals.bytes());
  if (m.context.device == DeviceType::kCpu) {
    for (const Tensor& touched : {a.touched_words, a.touched_positions}) {
      std::fill_n(touched.as<int32_t>(), touched.size(), -1);
    }
  }
  for (const LayerRecord& layer : m.activations.layers) {
    for (const Tensor& sum : {layer.moe.load, layer.moe.balance_loss}) {
      if (!sum.empty()) DeviceOf(m.context.device).Zero(m.context, sum.data, sum.bytes());
    }
  }
}

void GptModel::UpdateExpertBiases(Communicator* data_parallel) {
  Impl& m = *impl_;
  if (!m.config.moe_router_enable_expert_bias) return;
  for (size_t i = 0; i < m.layers.size(); ++i) {
    if (!m.layers[i].moe.present()) continue;
    const Tensor& load = m.activations.layers[i].moe.load;
    if (data_parallel != nullptr) data_parallel->AllReduce(load, ReduceOp::kSum);
    UpdateExpertBias(m.context, load, static_cast<float>(m.config.moe_router_bias_update_rate),
                     m.weights.value(m.layers[i].moe.expert_bias));
    DeviceOf(m.context.device).Zero(m.context, load.data, load.bytes());
  }
}

void GptModel::OnWeightsChanged() {
  Impl& m = *impl_;
  m.weights.Expire();
  // Narrow layers cast all their weights at once.
  if (m.observer == nullptr || !m.narrow->empty()) m.Need(m.parameter_count);
  m.narrow->OnWeightsChanged(m.weights);
}

void GptModel::Observe(PassObserver* observer) { impl_->observer = observer; }

void GptModel::UpdateScales(Communicator* ranks) {
  if (impl_->narrow->UpdateScales(ranks)) impl_->recording = {};  // The first scales: a graph knows only how to do without.
}

bool GptModel::HasNarrowProducts() const { return impl_->narrow->takes_codes(); }

std::vector<std::pair<std::string, Tensor>> GptModel::StateTensors() const { return impl_->narrow->StateTensors(); }

void GptModel::OnStateRestored() {
  impl_->narrow->Restored();
  impl_->recording = {};
}

void GptModel::AddForwardBackward(const HostMicrobatch& batch, float grad_scale, RngStreams* streams) {
  AddForwardBackwards({&batch, 1}, grad_scale, streams);
}

void GptModel::AddForwardBackwards(std::span<const HostMicrobatch> batches, float grad_scale, RngStreams* streams) {
  Impl& m = *impl_;
  for (const HostMicrobatch& batch : batches) m.CheckBatch(batch);
  if (streams == nullptr) ThrowEngineError("training without random streams");
  const bool replay = m.graphs != Graphs::kNone && m.calls_before_graphs-- <= 0;
  if (replay && m.graphs == Graphs::kCall) return m.Replay(batches, grad_scale, streams);
  for (size_t i = 0; i < batches.size(); ++i) {
    if (replay) {
      m.Replay(batches.subspan(i, 1), grad_scale, streams);
    } else {
      m.RunBatch(batches[i], grad_scale, streams);
    }
  }
}

void GptModel::UseGraphs(Graphs graphs, int microbatches, int64_t warm_up) {
  Impl& m = *impl_;
  // A graph would repeat the draws of stochastic rounding.
  if (m.context.device == DeviceType::kCpu || m.config.low_precision.recipe == ScalingRecipe::kNvfp4) return;
  m.graphs = graphs;
  m.calls_before_graphs = warm_up;
  m.recording = {};
  if (graphs == Graphs::kCall) m.inputs = MicrobatchInputs(m.context, m.micro_batch_size, m.config.seq_length, microbatches);
}

int64_t GptModel::RecordedNodes() const { return impl_->recording.graph.nodes; }

void GptModel::AddEvaluation(const HostMicrobatch& batch) {
  impl_->CheckBatch(batch);
  impl_->ForwardToLoss(impl_->StepFor(nullptr), impl_->inputs.Upload(batch), 0.0f);
}

GptModel::LossSum GptModel::TakeLossSum() {
  const Context& context = impl_->context;
  const Tensor& totals = impl_->activations.loss_totals;
  Device& device = DeviceOf(context.device);
  double host[2] = {0, 0};
  device.CopyToHost(context, host, totals.data, sizeof(host));
  device.Zero(context, totals.data, totals.bytes());
  device.Synchronize(context);
  return {host[0], host[1]};
}

void GptModel::MoveLossSum(const Tensor& sums) {
  const Tensor& totals = impl_->activations.loss_totals;
  Device& device = DeviceOf(impl_->context.device);
  device.CopyOnDevice(impl_->context, sums.data, totals.data, totals.bytes());
  device.Zero(impl_->context, totals.data, totals.bytes());
}

GptModel::LossSum GptModel::ForwardBackward(const int32_t* tokens, const int32_t* labels, const float* loss_mask,
                                            const int32_t* position_ids, float grad_scale, RngStreams* streams) {
  AddForwardBackward({tokens, labels, loss_mask, position_ids}, grad_scale, streams);
  return TakeLossSum();
}

GptModel::LossSum GptModel::Evaluate(const int32_t* tokens, const int32_t* labels, const float* loss_mask,
                                     const int32_t* position_ids) {
  AddEvaluation({tokens, labels, loss_mask, position_ids});
  return TakeLossSum();
}

void GptModel::Logits(const int32_t* tokens, const int32_t* position_ids, const Tensor& logits) {
  Impl& m = *impl_;
  const HostMicrobatch batch{.tokens = tokens, .position_ids = position_ids};
  m.CheckBatch(batch);
  const Step step = m.StepFor(nullptr);
  m.Forward(step, m.inputs.Upload(batch));
  Gemm(step.context, AsMatrix(GatherSequence(step, m.activations.normed)), AsMatrix(m.weights.value(m.output_table)),
       AsMatrix(logits), {.transpose_b = true});
  Convert(step.context, logits, step.precision, logits);
  const LogitTransform transform = LogitTransformOf(m.config);
  if (!transform.identity()) TransformLogits(step.context, AsMatrix(logits), transform, step.precision);
}

const GptConfig& GptModel::config() const { return impl_->config; }

int64_t GptModel::ActivationBytes() const {
  return static_cast<int64_t>(impl_->arena.capacity() + impl_->again.capacity()) + impl_->weights.bytes() +
         impl_->narrow->bytes();
}

GptModel::MemoryPlan GptModel::PlanMemory(const ParameterStore& store, int micro_batch_size) const {
  const Impl& m = *impl_;
  const int64_t narrow = m.narrow->Plan(m.config.seq_length * micro_batch_size);  // Before the records ask for it.
  Arena arena = Arena::Planning(m.context.device), again = Arena::Planning(m.context.device);
  const Activations a = Activations::Allocate(&arena, &again, m.StepFor(nullptr, micro_batch_size));
  const auto bytes = [](size_t count) { return static_cast<int64_t>(count); };
  MemoryPlan plan;
  plan.activations = bytes(a.kept_bytes + again.peak());
  plan.scratch = bytes(arena.peak() - a.kept_bytes) + narrow;
  if (m.storage != store.dtype()) plan.weight_copies = store.PlannedElements() * bytes(SizeOf(m.storage));
  return plan;
}

double GptModel::FlopsPerToken() const {
  const GptConfig& c = impl_->config;
  const auto h = static_cast<double>(c.hidden_size), q = static_cast<double>(c.num_attention_heads * c.kv_channels);
  const auto s = static_cast<double>(c.seq_length);
  double projections = h * static_cast<double>(QkvWidth(c)) + q * h, core = q * s;
  if (c.multi_latent_attention) {
    const MlaLayout layout = MlaLayoutOf(c);
    const auto query = static_cast<double>(layout.query_width()), rank = static_cast<double>(c.q_lora_rank);
    const auto latent = static_cast<double>(c.kv_lora_rank), context = static_cast<double>(ContextWidth(c));
    projections = (rank > 0 ? rank * (h + query + 1) : h * query) + h * static_cast<double>(c.qk_pos_emb_head_dim) +
                  latent * (h + static_cast<double>(layout.key_value_width()) + 1) + context * h;
    core = s * (query + context) / 2;
  }
  const auto inner = static_cast<double>(MambaInnerWidth(c));
  // The scan: Megatron-LM's 7 operations for each element of the state.
  const double mamba =
      h * (static_cast<double>(MambaProjectionWidth(c)) + inner) + 3.5 * inner * static_cast<double>(c.mamba_state_dim);
  // Recalling, correcting and reading the state are a product each.
  const auto values = static_cast<double>(DeltaLayoutOf(c).value_width());
  const double delta =
      h * (static_cast<double>(GatedDeltaWidth(c)) + values) + 3 * values * static_cast<double>(c.linear_key_head_dim);
  const double mlp = h * static_cast<double>(Fc1Width(c) + c.ffn_hidden_size);
  const double experts =
      3 * h * static_cast<double>(c.moe_router_topk * c.moe_ffn_hidden_size + c.moe_shared_expert_intermediate_size);
  const auto count = [&c](bool (*has)(const GptConfig&, int64_t)) { return static_cast<double>(CountLayers(c, has)); };
  return 6 *
         (count(HasAttention) * (projections + core) + count(HasMamba) * mamba + count(HasGatedDelta) * delta +
          (count(HasMlp) - count(IsMoeLayer)) * mlp + count(IsMoeLayer) * experts + h * static_cast<double>(c.padded_vocab_size));
}

}  // namespace mbridge
