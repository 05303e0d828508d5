#include "engine/train/training_plan.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/train/expert_parts.h"
#include "engine/train/mixer_parts.h"
#include "engine/train/model_parts.h"
#include "engine/train/precision_parts.h"
#include "mbridge/v1/config.pb.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using Problems = std::vector<FieldViolation>;

// The word of an enumerated key, or a problem that names it.
template <class Parse> auto ParseWord(const char* key, const std::string& word, Parse parse, Problems* problems) {
  const auto value = parse(word);
  if (!value.has_value()) problems->push_back({key, fmt::format("\"{}\" is not a value of this key", word)});
  return value;
}

DType ModelDType(const v1::ConfigContainer& config) {
  if (config.model().fp16()) return DType::kF16;
  return config.model().bf16() ? DType::kBF16 : DType::kF32;
}

std::optional<PositionKind> ParsePositionKind(std::string_view word) {
  if (word == "learned_absolute") return PositionKind::kLearnedAbsolute;
  if (word == "rope" || word == "yarn") return PositionKind::kRope;
  if (word == "none") return PositionKind::kNone;
  return std::nullopt;
}

void ReadModel(const v1::ConfigContainer& config, TrainingPlan* plan, Problems* problems) {
  const v1::ModelConfig& model = config.model();
  GptConfig& gpt = plan->model;
  gpt.num_layers = model.num_layers();
  gpt.hidden_size = model.hidden_size();
  gpt.num_attention_heads = model.num_attention_heads();
  gpt.num_query_groups = model.num_query_groups();
  gpt.kv_channels = model.kv_channels();
  gpt.ffn_hidden_size = model.ffn_hidden_size();
  gpt.seq_length = model.seq_length();
  gpt.max_position_embeddings = model.seq_length();
  gpt.padded_vocab_size = model.vocab_size();
  gpt.normalization = model.normalization() == "RMSNorm" ? NormKind::kRmsNorm : NormKind::kLayerNorm;
  ReadActivation(model, &gpt, problems);
  if (auto kind = ParseWord("model.position_embedding_type", model.position_embedding_type(), ParsePositionKind, problems)) {
    gpt.position_embedding = *kind;
  }
  gpt.add_bias_linear = model.add_bias_linear();
  gpt.add_qkv_bias = model.add_qkv_bias();
  gpt.add_attention_output_bias = model.add_attention_output_bias();
  gpt.add_mlp_bias = model.add_mlp_bias();
  gpt.qk_layernorm = model.qk_layernorm();
  if (model.window_size_size() > 0) gpt.attention_window = model.window_size(0) + 1;
  gpt.tied_embeddings = model.share_embeddings_and_output_weights();
  ReadModelParts(model, &gpt, problems);
  gpt.hidden_dropout = model.hidden_dropout();
  gpt.attention_dropout = model.attention_dropout();
  gpt.layernorm_epsilon = model.layernorm_epsilon();
  gpt.init_method_std = model.init_method_std();
  if (model.has_embedding_init_method_std()) gpt.embedding_init_std = model.embedding_init_method_std();
  gpt.bias_activation_fusion = model.bias_activation_fusion();
  gpt.bias_dropout_fusion = model.bias_dropout_fusion();
  gpt.attention_softmax_in_fp32 = model.attention_softmax_in_fp32();
  gpt.cross_entropy_loss_fusion = model.cross_entropy_loss_fusion();
  gpt.sequence_parallel = model.sequence_parallel();
  gpt.dtype = ModelDType(config);
  ReadLowPrecision(model, &gpt, problems);
  ReadExpertParts(model, &gpt, problems);
  ReadMixerParts(model, &gpt, problems);
}

void ReadBatches(const v1::ConfigContainer& config, int data_parallel_size, TrainingPlan* plan, Problems* problems) {
  const v1::TrainConfig& train = config.train();
  plan->global_batch_size = train.global_batch_size();
  plan->micro_batch_size = train.micro_batch_size();
  plan->train_iters = train.train_iters();
  const int64_t step = plan->micro_batch_size * data_parallel_size;
  if (plan->micro_batch_size <= 0 || step <= 0 || plan->global_batch_size % step != 0) {
    problems->push_back({"train.global_batch_size",
                         fmt::format("{} is not a multiple of train.micro_batch_size {} times the data-parallel size {}",
                                     plan->global_batch_size, plan->micro_batch_size, data_parallel_size)});
    return;
  }
  plan->microbatches = plan->global_batch_size / step;
  plan->exit_interval = train.exit_interval();
  plan->exit_duration_minutes = train.exit_duration_in_mins();
  plan->eval_interval = config.validation().eval_interval();
  plan->eval_iters = config.validation().eval_iters();
}

void ReadSchedule(const v1::ConfigContainer& config, TrainingPlan* plan, Problems* problems) {
  const v1::SchedulerConfig& scheduler = config.scheduler();
  const v1::OptimizerConfig& optimizer = config.optimizer();
  const int64_t batch = plan->global_batch_size;
  ScheduleOptions& schedule = plan->schedule;
  schedule.init_lr = scheduler.lr_warmup_init();
  schedule.max_lr = optimizer.lr();
  schedule.min_lr = optimizer.min_lr();
  if (auto style = ParseWord("scheduler.lr_decay_style", scheduler.lr_decay_style(), ParseLrDecayStyle, problems)) {
    schedule.lr_style = *style;
  }
  if (auto style = ParseWord("scheduler.lr_wsd_decay_style", scheduler.lr_wsd_decay_style(), ParseWsdDecayStyle, problems)) {
    schedule.wsd_style = *style;
  }
  const std::string& increase = scheduler.weight_decay_incr_style();
  if (auto style = ParseWord("scheduler.weight_decay_incr_style", increase, ParseWeightDecayStyle, problems)) {
    schedule.weight_decay_style = *style;
  }
  const int64_t length = scheduler.has_max_steps() ? scheduler.max_steps() : plan->train_iters;
  schedule.decay_samples = scheduler.has_lr_decay_samples()
                               ? scheduler.lr_decay_samples()
                               : (scheduler.has_lr_decay_iters() ? scheduler.lr_decay_iters() : length) * batch;
  if (scheduler.has_lr_warmup_fraction()) {
    schedule.warmup_samples = static_cast<int64_t>(scheduler.lr_warmup_fraction() * static_cast<double>(schedule.decay_samples));
  } else {
    schedule.warmup_samples =
        scheduler.lr_warmup_samples() > 0 ? scheduler.lr_warmup_samples() : scheduler.lr_warmup_iters() * batch;
  }
  schedule.wsd_decay_samples =
      scheduler.has_lr_wsd_decay_samples() ? scheduler.lr_wsd_decay_samples() : scheduler.lr_wsd_decay_iters() * batch;
  schedule.start_weight_decay = scheduler.has_start_weight_decay() ? scheduler.start_weight_decay() : optimizer.weight_decay();
  schedule.end_weight_decay = scheduler.has_end_weight_decay() ? scheduler.end_weight_decay() : optimizer.weight_decay();
  schedule.weight_decay_incr_samples = length * batch;
  for (const ScheduleProblem& problem : CheckSchedule(schedule)) problems->push_back({problem.field, problem.description});
}

void ReadOptimizerTypes(const v1::OptimizerConfig& optimizer, TrainingPlan* plan, Problems* problems) {
  const bool narrow = optimizer.exp_avg_dtype() == "bf16", aware = optimizer.use_precision_aware_optimizer();
  if (narrow != (optimizer.exp_avg_sq_dtype() == "bf16")) {
    problems->push_back({"optimizer.exp_avg_sq_dtype", fmt::format("is {}, exp_avg_dtype is {}: both must be the same",
                                                                   optimizer.exp_avg_sq_dtype(), optimizer.exp_avg_dtype())});
  } else if (narrow && !aware) {
    problems->push_back({"optimizer.exp_avg_dtype", "bf16 needs optimizer.use_precision_aware_optimizer=true"});
  }
  plan->moment_dtype = narrow ? DType::kBF16 : DType::kF32;
  plan->split_masters = aware && optimizer.store_param_remainders() && plan->model.dtype == DType::kBF16;
}

void ReadOptimizer(const v1::ConfigContainer& config, TrainingPlan* plan, Problems* problems) {
  const v1::OptimizerConfig& optimizer = config.optimizer();
  ReadOptimizerTypes(optimizer, plan, problems);
  plan->adam.beta1 = optimizer.adam_beta1();
  plan->adam.beta2 = optimizer.adam_beta2();
  plan->adam.eps = optimizer.adam_eps();
  plan->clip_grad = optimizer.clip_grad();
  plan->distributed_optimizer = config.ddp().use_distributed_optimizer() || optimizer.use_distributed_optimizer();
  plan->bucket_elements = config.ddp().bucket_size();
  plan->overlap_grad_reduce = config.ddp().overlap_grad_reduce();
  plan->overlap_param_gather = config.ddp().overlap_param_gather() || optimizer.overlap_param_gather();
  LossScalerOptions& scaler = plan->loss_scaler;
  if (plan->model.dtype == DType::kF16) {
    scaler.dynamic = !optimizer.has_loss_scale();
    scaler.initial_scale = static_cast<float>(scaler.dynamic ? optimizer.initial_loss_scale() : optimizer.loss_scale());
    scaler.min_scale = static_cast<float>(optimizer.min_loss_scale());
    scaler.growth_interval = optimizer.loss_scale_window();
    scaler.hysteresis = static_cast<int>(optimizer.hysteresis());
  }
}

// Samples that Megatron-LM asks each split for (mlm_numerics: train, validation, test).
void ReadData(const v1::ConfigContainer& config, TrainingPlan* plan) {
  const v1::DatasetConfig& dataset = config.dataset();
  GptDataConfig& data = plan->data;
  data.mock = dataset.mock();
  for (int i = 0; i < dataset.blend().prefixes_size(); ++i) {
    if (i < dataset.blend().weights_size()) data.data_path.push_back(fmt::format("{:.17g}", dataset.blend().weights(i)));
    data.data_path.push_back(dataset.blend().prefixes(i));
  }
  data.split = data.mock ? "1,1,1" : dataset.split();
  data.sequence_length = plan->model.seq_length;
  data.seed = dataset.random_seed();
  data.vocab_size = config.tokenizer().vocab_size();
  if (config.tokenizer().has_null_tokenizer_eod_id()) data.eod_id = config.tokenizer().null_tokenizer_eod_id();
  data.cache_path = dataset.path_to_cache();
  data.eod_mask_loss = dataset.eod_mask_loss();
  data.reset_position_ids = dataset.reset_position_ids();
  data.reset_attention_mask = dataset.reset_attention_mask();
  const int64_t evaluations = plan->eval_interval > 0 ? plan->train_iters / plan->eval_interval + 1 : 1;
  data.train_samples = plan->train_iters * plan->global_batch_size;
  data.valid_samples = evaluations * plan->eval_iters * plan->global_batch_size;
  data.test_samples = plan->eval_iters * plan->global_batch_size;
}

}  // namespace

absl::StatusOr<TrainingPlan> MakeTrainingPlan(const v1::ResolvedConfig& resolved) {
  const v1::ConfigContainer& config = resolved.config();
  TrainingPlan plan;
  Problems problems;
  plan.parallel.data = std::max(1, resolved.data_parallel_size());
  plan.parallel.tensor = static_cast<int>(std::max<int64_t>(1, config.model().tensor_model_parallel_size()));
  plan.flops_per_token = static_cast<double>(resolved.flops_per_token());
  ReadModel(config, &plan, &problems);
  ReadBatches(config, plan.parallel.data, &plan, &problems);
  ReadSchedule(config, &plan, &problems);
  ReadOptimizer(config, &plan, &problems);
  ReadData(config, &plan);
  plan.check_nan_in_loss = config.rerun_state_machine().check_for_nan_in_loss();
  plan.check_nan_in_grad = config.ddp().check_for_nan_in_grad();
  plan.log_interval = std::max<int64_t>(1, config.logger().log_interval());
  plan.log_params_norm = config.logger().log_params_norm();
  plan.log_num_zeros = config.logger().log_num_zeros_in_grad();
  plan.save_interval = config.checkpoint().save_interval();
  plan.save_optimizer = config.checkpoint().save_optim();
  plan.save_rng = config.checkpoint().save_rng();
  const std::string& graphs = config.model().cuda_graph_impl();
  if (graphs == "local") plan.graphs = GptModel::Graphs::kMicrobatch;
  if (graphs == "full_iteration") plan.graphs = GptModel::Graphs::kCall;
  if (config.model().has_cuda_graph_warmup_steps()) plan.graph_warm_up = config.model().cuda_graph_warmup_steps();
  plan.seed = static_cast<uint64_t>(config.rng().seed());
  // At most 31 years: libraries count in nanoseconds of 64 bits.
  plan.collective_timeout_seconds = std::min(1e9, 60.0 * static_cast<double>(config.dist().distributed_timeout_minutes()));
  if (!problems.empty()) return InvalidFields(v1::REASON_INVALID_CONFIG, problems);
  return plan;
}

absl::StatusOr<GptConfig> ModelOf(const v1::ConfigContainer& config) {
  TrainingPlan plan;
  Problems problems;
  ReadModel(config, &plan, &problems);
  if (!problems.empty()) return InvalidFields(v1::REASON_UNSUPPORTED_MODEL, problems);
  return plan.model;
}

}  // namespace mbridge
