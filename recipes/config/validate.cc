#include "recipes/config/validate.h"

#include <algorithm>

#include "mbridge/v1/options.pb.h"
#include "recipes/config/schema.h"

namespace mbridge::recipes {
namespace {

// The command line with `additions` (key, value) in place of what it says about these keys.
std::string CompletedCommand(const CommandLine& command, const std::vector<std::pair<std::string, std::string>>& additions) {
  std::string text = "mbctl submit --recipe " + command.recipe;
  for (const std::string& override_text : command.overrides) {
    const std::string key = override_text.substr(0, override_text.find('='));
    const std::string plain = key.substr(std::min(key.find_first_not_of('+'), key.size()));
    const bool replaced =
        std::any_of(additions.begin(), additions.end(), [&plain](const auto& addition) { return addition.first == plain; });
    if (!replaced) text += " " + override_text;
  }
  for (const auto& [key, value] : additions) text += " " + key + "=" + value;
  return text;
}

std::string Number(int64_t value) { return std::to_string(value); }

// Divisors of the batch per data-parallel rank, largest first, at most four: the micro batches that would work.
std::string WorkingMicroBatches(int64_t global_batch, int64_t data_parallel) {
  std::string words;
  int found = 0;
  if (global_batch % data_parallel != 0) return words;
  const int64_t share = global_batch / data_parallel;
  for (int64_t micro = std::min<int64_t>(share, 4096); micro >= 1 && found < 4; --micro) {
    if (share % micro != 0) continue;
    words += (found++ > 0 ? ", " : "") + Number(micro);
  }
  return words;
}

// Warm-up in the unit of the decay.
int64_t WarmupLength(const v1::SchedulerConfig& scheduler, bool in_samples, int64_t decay) {
  if (scheduler.has_lr_warmup_fraction())
    return static_cast<int64_t>(scheduler.lr_warmup_fraction() * static_cast<double>(decay));
  return in_samples ? scheduler.lr_warmup_samples() : scheduler.lr_warmup_iters();
}

// Values of working keys that the engine's model does not have.
std::vector<FieldViolation> UnsupportedModelParts(const v1::ModelConfig& model) {
  constexpr const char* kMissing = ", which needs an engine part that this version does not have; accepted: ";
  std::vector<FieldViolation> parts;
  const std::string& position = model.position_embedding_type();
  if (position == "mrope")
    parts.push_back({"model.position_embedding_type", "is " + position + kMissing + "learned_absolute, rope, yarn, none"});
  if (position == "yarn" && !model.has_yarn_rotary_scaling_factor())
    parts.push_back({"model.yarn_rotary_scaling_factor",
                     std::string("is missing with model.position_embedding_type=yarn; accepted: a factor above 0")});
  const std::string& activation = model.activation_func();
  const bool gated = model.gated_linear_unit(), tanh_or_erf = activation == "gelu" || activation == "gelu_pytorch_tanh";
  const bool of_experts = gated && model.num_moe_experts() > 0 && activation == "quick_gelu";
  if (!tanh_or_erf && !of_experts && activation != (gated ? "silu" : "squared_relu")) {
    parts.push_back({"model.activation_func", "is " + activation + (gated ? " with" : " without") + " model.gated_linear_unit" +
                                                  kMissing + "gelu, gelu_pytorch_tanh, squared_relu, or with " +
                                                  "model.gated_linear_unit=true silu, gelu, gelu_pytorch_tanh"});
  }
  const auto pattern = [&](const char* key, const auto& list) {
    const bool flags = std::all_of(list.begin(), list.end(), [](int64_t flag) { return flag == 0 || flag == 1; });
    if (list.size() == 1 && list[0] >= 1) return;
    if (list.empty() || (flags && list.size() == model.num_layers())) return;
    parts.push_back({key, "has " + Number(list.size()) +
                              " entries; accepted: one number from 1 on, or a 0 or 1 for each of the " +
                              Number(model.num_layers()) + " layers"});
  };
  pattern("model.window_attn_skip_freq", model.window_attn_skip_freq());
  pattern("model.no_rope_freq", model.no_rope_freq());
  if (model.qk_layernorm() && model.normalization() != "RMSNorm")
    parts.push_back({"model.qk_layernorm",
                     "is true with model.normalization " + model.normalization() + kMissing + "model.normalization=RMSNorm"});
  const auto& window = model.window_size();
  if (!window.empty() && (window.size() != 2 || window[0] < 0 || window[1] != 0))
    parts.push_back({"model.window_size", std::string("is no pair [left, 0] with left >= 0") + kMissing + "[left, 0]"});
  return parts;
}

void ValidateRotary(ConfigState* state) {
  const v1::ModelConfig& model = state->config.model();
  const std::string& position = model.position_embedding_type();
  if ((position != "rope" && position != "yarn") || model.multi_latent_attention() || model.kv_channels() < 1) return;
  const auto turned = static_cast<int64_t>(static_cast<double>(model.kv_channels()) * model.rotary_percent());
  if (turned >= 2 && turned % 2 == 0) return;
  state->Fail("model.rotary_percent", "is " + state->Text("model.rotary_percent") + " and turns " + Number(turned) +
                                          " of the model.kv_channels " + Number(model.kv_channels()) +
                                          " elements of a head; allowed: shares that make an even number from 2");
}

// Whole heads, groups, MLP columns and words on each rank.
void ValidateTensorParallel(ConfigState* state) {
  const v1::ModelConfig& model = state->config.model();
  const int64_t ranks = model.tensor_model_parallel_size();
  if (ranks <= 1) {
    if (model.sequence_parallel())
      state->Change("model.sequence_parallel", Value::Bool(false), "model.tensor_model_parallel_size is 1");
    return;
  }
  const auto divides = [&](const char* what, int64_t value, const std::string& advice = "") {
    if (value < 1 || value % ranks == 0) return;
    state->Fail("model.tensor_model_parallel_size",
                "is " + Number(ranks) + "; allowed: divisors of " + what + " " + Number(value) + advice);
  };
  divides("model.num_attention_heads", model.num_attention_heads());
  if (model.num_query_groups() != model.num_attention_heads()) {
    divides("model.num_query_groups", model.num_query_groups(),
            ", so that each rank has whole groups of queries (fewer groups than ranks are not built)");
  }
  divides("model.ffn_hidden_size", model.ffn_hidden_size());
  if (model.num_moe_experts() > 0) {
    divides("model.moe_ffn_hidden_size", model.moe_ffn_hidden_size());
    divides("model.moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size());
  }
  divides("model.vocab_size", model.vocab_size(), "; model.should_pad_vocab=true pads it");
  if (model.sequence_parallel()) divides("model.seq_length (with model.sequence_parallel)", model.seq_length());
}

// Sizes that are each allowed and together nobody's model; the estimates behind this stay within 64 bits.
void ValidateSize(ConfigState* state) {
  const v1::ModelConfig& m = state->config.model();
  const auto real = [](int64_t value) { return static_cast<double>(std::max<int64_t>(1, value)); };
  const double h = real(m.hidden_size()), layers = real(m.num_layers()),
               q = real(m.kv_channels()) * real(m.num_attention_heads());
  const double width = real(m.ffn_hidden_size()) + real(m.moe_ffn_hidden_size()) * real(m.num_moe_experts());
  const double parameters = layers * (4 * h * q + 3 * h * width) + 2 * h * real(m.vocab_size()) + h * real(m.seq_length());
  const double attention = layers * q * real(m.seq_length());
  if (std::max(parameters, attention) > 1e15) {
    return state->Fail("model.hidden_size", "is " + state->Text("model.hidden_size") +
                                                " and makes, with layers, heads and MLP, a model of about " +
                                                FormatDouble(parameters) + " parameters; allowed: at most 1e15");
  }
  const double tokens = real(m.seq_length()) * real(state->config.train().micro_batch_size());
  const double bytes =
      tokens * (layers * (16 * h + 8 * q + 8 * width + 3 * real(m.num_attention_heads()) * real(m.seq_length())) +
                8 * real(m.vocab_size()));
  if (bytes > 1e18) {
    state->Fail("train.micro_batch_size", "is " + state->Text("train.micro_batch_size") + " and needs about " +
                                              FormatDouble(bytes) + " bytes of activations with model.seq_length " +
                                              state->Text("model.seq_length") + "; allowed: at most 1e18");
  }
}

}  // namespace

void ValidateRequired(bool for_a_job, ConfigState* state) {
  const std::pair<const char*, const char*> required[] = {{"train.global_batch_size", "train.global_batch_size=32"},
                                                          {"train.micro_batch_size", "train.micro_batch_size=4"},
                                                          {"model.num_layers", "model.num_layers=2"},
                                                          {"model.hidden_size", "model.hidden_size=256"},
                                                          {"model.num_attention_heads", "model.num_attention_heads=4"},
                                                          {"optimizer.lr", "optimizer.lr=3e-4"},
                                                          {"tokenizer.tokenizer_type", "tokenizer.tokenizer_type=NullTokenizer"}};
  for (const auto& [key, example] : required) {
    const bool already = std::any_of(state->violations.begin(), state->violations.end(),
                                     [key = key](const FieldViolation& v) { return v.field == key; });
    if (already || state->Has(key)) continue;
    if (for_a_job) {
      state->Fail(key, std::string("is not set; add for example ") + example);
    } else {
      state->warnings.push_back(std::string(key) + " is not set and a job needs it; add for example " + example);
    }
  }
  if (!state->Has("optimizer.min_lr")) state->Derive("optimizer.min_lr", Value::Double(0.0), "default");
}

void ValidateModel(ConfigState* state) {
  const v1::ConfigContainer& config = state->config;
  const v1::ModelConfig& model = config.model();
  const int64_t heads = model.num_attention_heads(), groups = model.num_query_groups();
  if (heads > 0 && groups > 0 && heads % groups != 0) {
    state->Fail("model.num_query_groups",
                "is " + Number(groups) + "; allowed: divisors of model.num_attention_heads " + Number(heads));
  }
  const int64_t pp = model.pipeline_model_parallel_size(), cp = model.context_parallel_size();
  ValidateTensorParallel(state);
  if (pp > 1 && model.num_layers() % pp != 0) {
    state->Fail("model.pipeline_model_parallel_size",
                "is " + Number(pp) + "; allowed: divisors of model.num_layers " + Number(model.num_layers()));
  }
  if (cp > 1 && model.seq_length() % (2 * cp) != 0) {
    state->Fail("model.context_parallel_size",
                "is " + Number(cp) + " and twice that does not divide model.seq_length " + Number(model.seq_length()));
  }
  if (model.expert_model_parallel_size() > 1 &&
      (model.num_moe_experts() < 1 || model.num_moe_experts() % model.expert_model_parallel_size() != 0)) {
    state->Fail("model.expert_model_parallel_size",
                "is " + Number(model.expert_model_parallel_size()) + "; allowed: divisors of model.num_moe_experts");
  }
  const int64_t tokens = config.tokenizer().vocab_size();
  if (tokens > 0 && model.vocab_size() > 0 && model.vocab_size() < tokens) {
    state->Fail("model.vocab_size", "is " + Number(model.vocab_size()) + "; allowed: >= tokenizer.vocab_size, which is " +
                                        Number(tokens) + " (a token id beyond the model's vocabulary can't be embedded)");
  }
  if (tokens > 0 && config.tokenizer().null_tokenizer_eod_id() >= tokens) {
    state->Fail("tokenizer.null_tokenizer_eod_id", "is " + state->Text("tokenizer.null_tokenizer_eod_id") + "; allowed: 0 .. " +
                                                       Number(tokens - 1) + " (below tokenizer.vocab_size)");
  }
  if (config.tokenizer().tokenizer_type() == "ByteLevelTokenizer" && tokens > 0 && tokens < 257) {
    state->Fail("tokenizer.vocab_size", "is " + Number(tokens) + "; the ByteLevelTokenizer needs 257 or more, or leave it out");
  }
  if (config.dataset().mock() && tokens > 0 && tokens < 2)
    state->Fail("tokenizer.vocab_size", "is " + Number(tokens) + "; mock data need 2 or more");
  ValidateRotary(state);
  ValidateExperts(state);
  ValidateMixers(state);
  ValidatePrecision(state);
  ValidateExecution(state);
  ValidateSize(state);
}

void ValidateCheckpoints(ConfigState* state) {
  if (state->config.checkpoint().most_recent_k() == 0) {
    state->Fail("checkpoint.most_recent_k",
                "is 0; allowed: -1 (keep all) or 1 and more (the newest checkpoint is never deleted)");
  }
}

void ValidateBatch(const Layout& layout, ConfigState* state) {
  const v1::TrainConfig& train = state->config.train();
  const int64_t global = train.global_batch_size(), micro = train.micro_batch_size(), dp = layout.data_parallel;
  if (static_cast<double>(global) * static_cast<double>(train.train_iters()) > 1e15) {
    state->Fail("train.train_iters", "is " + state->Text("train.train_iters") + " and makes, with train.global_batch_size " +
                                         Number(global) + ", more than 1e15 samples; use fewer");
  }
  if (global < 1 || micro < 1 || global % (micro * dp) == 0) return;
  const int64_t unit = micro * dp;
  const int64_t below = global / unit * unit;
  std::string next = "use train.global_batch_size=" + (below > 0 ? Number(below) + " or " : "") + Number(below + unit);
  const std::string micros = WorkingMicroBatches(global, dp);
  if (!micros.empty()) next += ", or a train.micro_batch_size of " + micros;
  state->Fail("train.global_batch_size",
              "is " + Number(global) + "; allowed: multiples of train.micro_batch_size * data parallel size = " + Number(micro) +
                  " * " + Number(dp) + " = " + Number(unit) + "; " + next);
}

void ValidateSchedule(const CommandLine& command, ConfigState* state) {
  const v1::ConfigContainer& config = state->config;
  const v1::OptimizerConfig& optimizer = config.optimizer();
  const v1::SchedulerConfig& scheduler = config.scheduler();
  if (optimizer.min_lr() > optimizer.lr() && optimizer.has_lr()) {
    state->Fail("optimizer.min_lr", "is " + state->Text("optimizer.min_lr") + "; allowed: 0 .. optimizer.lr, which is " +
                                        state->Text("optimizer.lr"));
  }
  if (scheduler.lr_warmup_init() > optimizer.lr() && optimizer.has_lr()) {
    state->Fail("scheduler.lr_warmup_init", "is " + state->Text("scheduler.lr_warmup_init") +
                                                "; allowed: 0 .. optimizer.lr, which is " + state->Text("optimizer.lr"));
  }
  const bool in_samples = config.train().has_train_samples();
  const std::string counted = in_samples ? "samples" : "iters";
  const std::string length_key = "train.train_" + counted, decay_key = "scheduler.lr_decay_" + counted;
  const std::string warmup_key =
      scheduler.has_lr_warmup_fraction() ? "scheduler.lr_warmup_fraction" : "scheduler.lr_warmup_" + counted;
  const int64_t length = in_samples ? config.train().train_samples() : config.train().train_iters();
  const int64_t decay = in_samples ? scheduler.lr_decay_samples() : scheduler.lr_decay_iters();
  if (length < 1 || decay < 1) return;
  const int64_t warmup = WarmupLength(scheduler, in_samples, decay);
  if (scheduler.lr_decay_style() == "WSD") {
    const int64_t wsd = in_samples ? scheduler.lr_wsd_decay_samples() : scheduler.lr_wsd_decay_iters();
    if (wsd > decay)
      state->Fail("scheduler.lr_wsd_decay_" + counted,
                  "is " + Number(wsd) + "; allowed: 1 .. " + decay_key + ", which is " + Number(decay));
  }
  if (config.scheduler().has_max_steps() && config.scheduler().max_steps() < length && !in_samples) {
    state->Fail("scheduler.max_steps",
                "is " + Number(scheduler.max_steps()) + "; allowed: >= train.train_iters, which is " + Number(length));
  }
  // A schedule longer than the training would end it with a learning rate nobody asked for. scheduler.max_steps says that the
  // training is a part of a longer one.
  const bool short_of_decay = length < decay && !scheduler.has_max_steps();
  const bool short_of_warmup = warmup >= std::min(length, decay);
  if (!short_of_decay && !short_of_warmup) return;
  const int64_t unit = in_samples ? std::max<int64_t>(1, config.train().global_batch_size()) : 1;
  const int64_t short_warmup = length <= unit ? 0 : std::max<int64_t>(unit, std::min(warmup, length / 10 / unit * unit));
  std::vector<std::pair<std::string, std::string>> additions;
  if (short_of_warmup) {
    additions.emplace_back("scheduler.lr_warmup_" + counted, Number(short_warmup));
    if (scheduler.has_lr_warmup_fraction()) additions.emplace_back("scheduler.lr_warmup_fraction", "null");
  }
  additions.emplace_back(decay_key, Number(length));
  const std::string what = short_of_warmup ? "warm-up (" + warmup_key + "=" + state->Text(warmup_key) + ") does not end before " +
                                                 (length < decay ? "training" : "decay") + " does"
                                           : "decay (" + decay_key + "=" + Number(decay) + ") does not end before training does";
  std::string message = "is " + Number(length) + " but the " + what + "; give the schedule its length too:\n  " +
                        CompletedCommand(command, additions);
  if (short_of_decay) {
    message += "\nTo train only the first " + Number(length) + " of " + Number(decay) + " " + counted + ", set " + length_key +
               "=" + Number(decay) + " and stop with train.exit_interval" + (in_samples ? "." : "=" + Number(length) + ".");
  }
  state->Fail(length_key, message);
}

std::vector<FieldViolation> UnsupportedKeys(const ConfigState& state) {
  std::vector<FieldViolation> unsupported;
  for (const Key& key : Schema::Get().keys()) {
    if (key.info->effect() != v1::EFFECT_PLANNED) continue;
    const Value value = ReadKey(state.config, key);
    if (value.is_null()) continue;
    Value accepted = key.Default();
    if (!key.info->only().empty()) accepted = ParseWord(key.info->only());
    if (value == accepted) continue;
    unsupported.push_back({key.path, "is " + FormatValue(value) +
                                         ", which needs an engine part that this version does not have; accepted: " +
                                         (accepted.is_null() ? "leave it out" : FormatValue(accepted))});
  }
  static const char* kTokenizers[] = {"NullTokenizer", "ByteLevelTokenizer"};
  const std::string& tokenizer = state.config.tokenizer().tokenizer_type();
  if (!tokenizer.empty() && std::find(std::begin(kTokenizers), std::end(kTokenizers), tokenizer) == std::end(kTokenizers)) {
    unsupported.push_back(
        {"tokenizer.tokenizer_type",
         "is " + tokenizer + ", which this version does not have; accepted: NullTokenizer, ByteLevelTokenizer"});
  }
  const std::vector<FieldViolation> parts = UnsupportedModelParts(state.config.model());
  unsupported.insert(unsupported.end(), parts.begin(), parts.end());
  const std::vector<FieldViolation> precision = UnsupportedPrecision(state.config.model());
  unsupported.insert(unsupported.end(), precision.begin(), precision.end());
  const std::vector<FieldViolation> experts = UnsupportedExpertParts(state.config.model());
  unsupported.insert(unsupported.end(), experts.begin(), experts.end());
  const std::vector<FieldViolation> mixers = UnsupportedMixerParts(state.config.model());
  unsupported.insert(unsupported.end(), mixers.begin(), mixers.end());
  const std::vector<FieldViolation> execution = UnsupportedExecution(state.config.model());
  unsupported.insert(unsupported.end(), execution.begin(), execution.end());
  return unsupported;
}

}  // namespace mbridge::recipes
