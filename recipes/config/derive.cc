#include "recipes/config/derive.h"

#include <algorithm>
#include <set>

#include "mbridge/v1/options.pb.h"
#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

// Keys whose engine part is still to come, but whose defaults describe the model.
const std::set<std::string>& StructuralKeys() {
  static const std::set<std::string> keys = {"model.tensor_model_parallel_size",
                                             "model.pipeline_model_parallel_size",
                                             "model.context_parallel_size",
                                             "model.expert_model_parallel_size",
                                             "model.sequence_parallel",
                                             "model.normalization",
                                             "model.position_embedding_type",
                                             "model.activation_func",
                                             "model.gated_linear_unit",
                                             "model.add_bias_linear",
                                             "model.share_embeddings_and_output_weights",
                                             "ddp.overlap_grad_reduce",
                                             "ddp.overlap_param_gather",
                                             "optimizer.optimizer",
                                             "dataset.dataloader_type",
                                             "mixed_precision.grad_reduce_in_fp32"};
  return keys;
}

// ByteLevelTokenizer: id = byte, then the end of document.
constexpr int64_t kByteVocabulary = 257;

// Splits "969, 30, 1"; empty when a part is no number >= 0 or there are more than three.
std::vector<double> ParseSplit(const std::string& split) {
  std::vector<double> shares;
  std::string part;
  for (char c : split + ",") {
    if (c != ',') {
      if (c != ' ') part += c;
      continue;
    }
    const Value value = part.empty() ? Value::Null() : ParseWord(part);
    const bool number = value.kind == Value::Kind::kInt || value.kind == Value::Kind::kDouble;
    if (!number || !(value.number >= 0) || value.number > 1e12) return {};
    shares.push_back(value.number);
    part.clear();
  }
  return shares.size() <= 3 ? shares : std::vector<double>{};
}

void DeriveBlend(ConfigState* state) {
  const auto& path = state->config.dataset().data_path();
  if (path.empty()) return;
  v1::Blend blend;
  bool weighted = path.size() % 2 == 0;
  for (int i = 0; weighted && i < path.size(); i += 2) {
    const Value weight = ParseWord(path[i]);
    weighted = weight.kind == Value::Kind::kInt || weight.kind == Value::Kind::kDouble;
  }
  std::vector<Value> prefixes, weights;
  for (int i = 0; i < path.size(); ++i) {
    if (weighted && i % 2 == 0) {
      weights.push_back(Value::Double(ParseWord(path[i]).number));
    } else {
      prefixes.push_back(Value::String(path[i]));
    }
  }
  const Value value = Value::List({Value::List(prefixes), weights.empty() ? Value::Null() : Value::List(weights)});
  for (const Value& weight : weights) {
    if (!(weight.number > 0))
      return state->Fail("dataset.data_path", "has the weight " + FormatDouble(weight.number) + "; weights are numbers > 0");
  }
  if (state->Has("dataset.blend") && state->Get("dataset.blend") != value) {
    if (state->LevelOf("dataset.blend") >= state->LevelOf("dataset.data_path")) {
      return state->Fail("dataset.blend", "and dataset.data_path name different data; set one of them");
    }
    state->Change("dataset.blend", value, "dataset.data_path");
    return;
  }
  state->Derive("dataset.blend", value, "dataset.data_path");
}

void DeriveMock(ConfigState* state) {
  std::string data_key;
  for (const char* key :
       {"dataset.data_path", "dataset.blend", "dataset.blend_per_split", "dataset.hf_dataset", "dataset.dataset_root"}) {
    if (data_key.empty() && state->Has(key)) data_key = key;
  }
  const bool data = !data_key.empty();
  if (!state->Has("dataset.mock")) return state->Derive("dataset.mock", Value::Bool(!data), data ? data_key : "no data given");
  const bool mock = state->config.dataset().mock();
  if (mock && data) {
    if (state->LevelOf("dataset.mock") >= state->LevelOf(data_key)) {
      return state->Fail("dataset.mock", "is true but " + data_key + " names data; leave one of them out");
    }
    state->Change("dataset.mock", Value::Bool(false), data_key + " names data");
  } else if (!mock && !data) {
    state->Fail("dataset.data_path",
                "is not set although dataset.mock=false; give prefixes of .bin/.idx files, or dataset.mock=true");
  }
}

void DeriveSplit(ConfigState* state) {
  if (state->config.dataset().mock()) {
    const std::string why = "mock data are always split 1,1,1, as in Megatron-LM";
    return state->Has("dataset.split") ? state->Change("dataset.split", Value::String("1,1,1"), why)
                                       : state->Derive("dataset.split", Value::String("1,1,1"), why);
  }
  if (!state->Has("dataset.blend")) return;  // Data that are split already.
  if (!state->Has("dataset.split"))
    return state->Derive("dataset.split", Value::String("969, 30, 1"), "Megatron-LM's default for real data");
  const std::vector<double> shares = ParseSplit(state->config.dataset().split());
  double sum = 0;
  for (double share : shares) sum += share;
  if (shares.empty() || !(sum > 0)) {
    state->Fail("dataset.split",
                "is " + state->Text("dataset.split") + "; expects up to three numbers >= 0 with a sum > 0, for example '99,1,0'");
  } else if (shares[0] == 0) {
    state->Fail("dataset.split",
                "is " + state->Text("dataset.split") + " and leaves nothing to train on; the first share must be > 0");
  }
}

void DeriveVocabulary(ConfigState* state) {
  const v1::ConfigContainer& config = state->config;
  const std::string& type = config.tokenizer().tokenizer_type();
  if (type == "ByteLevelTokenizer") {
    if (!state->Has("tokenizer.vocab_size") ||
        state->LevelOf("tokenizer.vocab_size") < state->LevelOf("tokenizer.tokenizer_type")) {
      state->Change("tokenizer.vocab_size", Value::Int(kByteVocabulary), "256 bytes and the end-of-document token");
    }
    if (!state->Has("tokenizer.null_tokenizer_eod_id")) {
      state->Derive("tokenizer.null_tokenizer_eod_id", Value::Int(kByteVocabulary - 1),
                    "end of document of the ByteLevelTokenizer");
    }
  }
  const int64_t tokens = config.tokenizer().vocab_size();
  const int64_t multiple =
      config.model().make_vocab_size_divisible_by() * std::max<int64_t>(1, config.model().tensor_model_parallel_size());
  const auto padded = [multiple](int64_t size) { return (size + multiple - 1) / multiple * multiple; };
  const bool own = state->Has("model.vocab_size");
  const bool from_tokenizer = config.tokenizer().use_tokenizer_vocab_size() &&
                              !(own && state->LevelOf("model.vocab_size") > state->LevelOf("tokenizer.use_tokenizer_vocab_size"));
  if (own && config.tokenizer().use_tokenizer_vocab_size() && !from_tokenizer) {
    state->Change("tokenizer.use_tokenizer_vocab_size", Value::Bool(false), "model.vocab_size is set");
  }
  if (tokens > 0 && !state->Has("tokenizer.null_tokenizer_eod_id") && type == "NullTokenizer") {
    state->Derive("tokenizer.null_tokenizer_eod_id", Value::Int(tokens - 1), "the last token of the vocabulary");
  }
  if (own && !from_tokenizer) {
    if (config.model().should_pad_vocab()) {
      state->Change("model.vocab_size", Value::Int(padded(config.model().vocab_size())),
                    "padded to a multiple of " + std::to_string(multiple));
    }
    return;
  }
  if (tokens <= 0) {
    return state->Fail(
        "tokenizer.vocab_size",
        "is not set and model.vocab_size neither; set tokenizer.vocab_size (the NullTokenizer has no vocabulary of its own)");
  }
  const bool pad = config.model().should_pad_vocab() || !state->SetByUser("model.should_pad_vocab");
  const int64_t size = pad ? padded(tokens) : tokens;
  const std::string from =
      "tokenizer.vocab_size" + std::string(pad ? ", padded to a multiple of " + std::to_string(multiple) : "");
  if (own && config.model().vocab_size() != size && state->LevelOf("model.vocab_size") >= kFile) {
    return state->Fail("model.vocab_size", "is " + state->Text("model.vocab_size") +
                                               " but tokenizer.use_tokenizer_vocab_size=true makes it " + std::to_string(size) +
                                               "; leave one of them out");
  }
  if (pad) state->Derive("model.should_pad_vocab", Value::Bool(true), "tokenizer.use_tokenizer_vocab_size");
  state->Change("model.vocab_size", Value::Int(size), from);
}

}  // namespace

void ApplyDefaults(ConfigState* state) {
  for (const Key& key : Schema::Get().keys()) {
    if (state->LevelOf(key.path) != kUnset || key.info->default_value().empty()) continue;
    if (!key.Works() && StructuralKeys().count(key.path) == 0) continue;
    state->Set(key.path, key.Default(), v1::ORIGIN_DEFAULT, "default", kDefault);
  }
}

void DeriveModel(ConfigState* state) {
  const v1::ModelConfig& model = state->config.model();
  if (!state->Has("dataset.seq_length")) {
    state->Derive("dataset.seq_length", state->Get("model.seq_length"), "model.seq_length");
  } else if (model.seq_length() != state->config.dataset().seq_length()) {
    if (state->SetByUser("model.seq_length") && state->LevelOf("model.seq_length") == state->LevelOf("dataset.seq_length")) {
      state->Fail("dataset.seq_length", "is " + state->Text("dataset.seq_length") + " but model.seq_length is " +
                                            state->Text("model.seq_length") +
                                            "; they must be equal: set dataset.seq_length alone");
    } else if (state->LevelOf("model.seq_length") > state->LevelOf("dataset.seq_length") &&
               state->SetByUser("model.seq_length")) {
      state->Change("dataset.seq_length", Value::Int(model.seq_length()), "model.seq_length");
    } else {
      state->Change("model.seq_length", Value::Int(state->config.dataset().seq_length()), "dataset.seq_length", kDefault);
    }
  }

  const int64_t hidden = model.hidden_size(), heads = model.num_attention_heads();
  if (!state->Has("model.ffn_hidden_size") && hidden > 0)
    state->Derive("model.ffn_hidden_size", Value::Int(4 * hidden), "4 * model.hidden_size");
  if (!state->Has("model.kv_channels") && hidden > 0 && heads > 0) {
    if (hidden % heads == 0) {
      state->Derive("model.kv_channels", Value::Int(hidden / heads), "model.hidden_size / model.num_attention_heads");
    } else {
      state->Fail("model.num_attention_heads", "is " + std::to_string(heads) + " and does not divide model.hidden_size " +
                                                   std::to_string(hidden) + "; choose a divisor, or set model.kv_channels");
    }
  }
  if (!state->Has("model.num_query_groups") && heads > 0)
    state->Derive("model.num_query_groups", Value::Int(heads), "model.num_attention_heads");
  if (!state->Has("model.embedding_init_method_std")) {
    state->Derive("model.embedding_init_method_std", Value::Double(model.init_method_std()), "model.init_method_std");
  }
  if (model.expert_model_parallel_size() > 1 && !state->Has("model.expert_tensor_parallel_size")) {
    state->Derive("model.expert_tensor_parallel_size", Value::Int(1), "model.expert_model_parallel_size > 1");
  }
  DeriveVocabulary(state);
}

void DeriveData(ConfigState* state) {
  DeriveBlend(state);
  DeriveMock(state);
  DeriveSplit(state);
}

void DeriveOptimizer(ConfigState* state) {
  state->Unify("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer",
               "optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer are one switch");
  state->Unify("logger.log_num_zeros_in_grad", "optimizer.log_num_zeros_in_grad",
               "logger.log_num_zeros_in_grad and optimizer.log_num_zeros_in_grad are one switch");

  // One meaning of weight decay: the schedule's start and end are optimizer.weight_decay unless they rise.
  const char* start = "scheduler.start_weight_decay";
  const char* end = "scheduler.end_weight_decay";
  const char* constant = "optimizer.weight_decay";
  const bool rises = state->config.scheduler().weight_decay_incr_style() != "constant";
  if (rises) {
    if (!state->Has(start) || !state->Has(end)) {
      state->Fail("scheduler.weight_decay_incr_style",
                  "is " + state->Text("scheduler.weight_decay_incr_style") +
                      " and needs scheduler.start_weight_decay and scheduler.end_weight_decay");
    } else if (state->config.scheduler().end_weight_decay() < state->config.scheduler().start_weight_decay()) {
      state->Fail(end, "is " + state->Text(end) + "; allowed: >= scheduler.start_weight_decay, which is " + state->Text(start));
    } else if (state->SetByUser(constant) && state->Get(constant) != state->Get(start)) {
      state->Fail(constant, "is " + state->Text(constant) + " but the weight decay rises from " + state->Text(start) + " to " +
                                state->Text(end) +
                                "; leave optimizer.weight_decay out, or use scheduler.weight_decay_incr_style=constant");
    } else {
      state->Change(constant, state->Get(start), "scheduler.start_weight_decay of a rising weight decay");
    }
    return;
  }
  for (const char* key : {start, end}) {
    if (!state->Has(key) || state->Get(key) == state->Get(constant)) continue;
    if (state->SetByUser(key) && state->LevelOf(key) == state->LevelOf(constant)) {
      state->Fail(key, "is " + state->Text(key) + " but optimizer.weight_decay is " + state->Text(constant) +
                           "; a constant weight decay has one value: set optimizer.weight_decay alone");
      return;
    }
    if (state->LevelOf(key) > state->LevelOf(constant))
      state->Change(constant, state->Get(key), std::string(key) + " of a constant weight decay");
  }
  for (const char* key : {start, end}) {
    if (!state->Has(key)) {
      state->Derive(key, state->Get(constant), constant);
    } else if (state->Get(key) != state->Get(constant)) {
      if (state->LevelOf(key) >= state->LevelOf(constant) && state->SetByUser(key)) {
        state->Fail(key, "is " + state->Text(key) + " but scheduler.weight_decay_incr_style=constant keeps the weight decay at " +
                             state->Text(constant) +
                             "; use scheduler.weight_decay_incr_style=linear, or set optimizer.weight_decay alone");
      } else {
        state->Change(key, state->Get(constant), "optimizer.weight_decay");
      }
    }
  }
}

int RequiredRanks(const v1::ConfigContainer& config) {
  const v1::ModelConfig& model = config.model();
  const auto size = [](int64_t value) { return std::clamp<int64_t>(value, 1, 1 << 16); };
  const int64_t pp = size(model.pipeline_model_parallel_size());
  const int64_t dense = size(model.tensor_model_parallel_size()) * pp * size(model.context_parallel_size());
  const int64_t experts = size(model.expert_model_parallel_size()) * size(model.expert_tensor_parallel_size()) * pp;
  for (int64_t ranks = dense; ranks <= 1 << 20; ranks += dense) {
    if (ranks % experts == 0) return static_cast<int>(ranks);
  }
  return static_cast<int>(std::min<int64_t>(std::max(dense, experts), 1 << 20));
}

Layout DeriveLayout(int ranks, ConfigState* state) {
  const v1::ModelConfig& model = state->config.model();
  const int required = RequiredRanks(state->config);
  Layout layout;
  layout.ranks = ranks == 0 ? required : ranks;
  const auto size = [](int64_t value) { return std::max<int64_t>(1, value); };
  const int64_t dense =
      size(model.tensor_model_parallel_size()) * size(model.pipeline_model_parallel_size()) * size(model.context_parallel_size());
  if (layout.ranks < 1 || layout.ranks % required != 0) {
    state->Fail("ranks",
                "is " + std::to_string(layout.ranks) + "; allowed: multiples of " + std::to_string(required) +
                    " (model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size = " +
                    std::to_string(dense) + ")");
    layout.ranks = required;
  }
  layout.data_parallel = std::max(1, static_cast<int>(layout.ranks / dense));
  return layout;
}

}  // namespace mbridge::recipes
