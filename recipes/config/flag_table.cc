#include "recipes/config/flag_table.h"

#include "mbridge/v1/options.pb.h"

namespace mbridge::recipes {
namespace {

using Arity = MegatronFlag::Arity;
using Kind = MegatronFlag::Kind;

MegatronFlag Fixed(std::string name, std::vector<std::pair<std::string, std::string>> values, std::string note = "") {
  MegatronFlag flag;
  flag.name = std::move(name);
  flag.kind = Kind::kFixed;
  flag.arity = Arity::kNone;
  flag.fixed = std::move(values);
  flag.note = std::move(note);
  return flag;
}

MegatronFlag Special(std::string name, Arity arity, std::string keys, std::string note = "") {
  MegatronFlag flag;
  flag.name = std::move(name);
  flag.kind = Kind::kSpecial;
  flag.arity = arity;
  flag.keys = std::move(keys);
  flag.note = std::move(note);
  return flag;
}

MegatronFlag Without(Kind kind, std::string name, Arity arity, std::string note) {
  MegatronFlag flag;
  flag.name = std::move(name);
  flag.kind = kind;
  flag.arity = arity;
  flag.note = std::move(note);
  return flag;
}

// A second name of a key's flag.
MegatronFlag Alias(std::string name, const std::string& key) {
  MegatronFlag flag;
  flag.name = std::move(name);
  flag.key = Schema::Get().Find(key);
  flag.arity = flag.key->TypeName() == "bool" ? Arity::kNone : Arity::kOne;
  return flag;
}

std::vector<MegatronFlag> OtherFlags() {
  const char* kernels = "the engine chooses its kernels; the numbers are those of the unfused form";
  const char* per_split = "one blend for each split is not part of this version; use --data-path and --split";
  return {
      Special("--seq-length", Arity::kOne, "dataset.seq_length", "model.seq_length follows"),
      Special("--max-position-embeddings", Arity::kOne, "model.seq_length",
              "must equal --seq-length: the position table has model.seq_length rows. Bridge's translator writes a key that its "
              "GPT model does not have"),
      Special("--seed", Arity::kOne, "rng.seed, dataset.random_seed",
              "Megatron-LM has one seed for weights, dropout and the order of the data"),
      Special("--group-query-attention", Arity::kNone, "model.num_query_groups",
              "without it Megatron-LM ignores --num-query-groups"),
      Special("--num-query-groups", Arity::kOne, "model.num_query_groups", "counts only with --group-query-attention"),
      Special("--num-layers-per-virtual-pipeline-stage", Arity::kOne, "model.virtual_pipeline_model_parallel_size",
              "--num-layers / PP / this number"),
      Special("--moe-layer-freq", Arity::kOne, "model.moe_layer_freq",
              "a number or a Python list expression like ([0]*1+[1]*26)"),
      Special("--load", Arity::kOne, "",
              "how a job starts is said at submit: --start resume or --start fork --from ID; fresh otherwise"),
      Fixed("--bf16", {{"mixed_precision", "bf16_mixed"}}),
      Fixed("--fp16", {{"mixed_precision", "fp16_mixed"}},
            "Bridge's translator writes 16-mixed, which its registry does not have. Gradients are reduced in fp32 here"),
      Fixed("--swiglu", {{"model.gated_linear_unit", "true"}, {"model.activation_func", "silu"}}),
      Fixed("--squared-relu", {{"model.activation_func", "squared_relu"}}),
      Fixed("--use-rotary-position-embeddings", {{"model.position_embedding_type", "rope"}}),
      Fixed("--apply-layernorm-1p", {{"model.layernorm_zero_centered_gamma", "true"}}),
      Fixed("--recompute-activations", {{"model.recompute_granularity", "selective"}}),
      Fixed("--use-distributed-optimizer",
            {{"optimizer.use_distributed_optimizer", "true"}, {"ddp.use_distributed_optimizer", "true"}},
            "one switch with two names"),
      Fixed("--no-check-for-nan-in-loss-and-grad",
            {{"ddp.check_for_nan_in_grad", "false"}, {"rerun_state_machine.check_for_nan_in_loss", "false"}},
            "Bridge's table clears only the check of the gradients"),
      Fixed("--grad-reduce-in-bf16", {{"ddp.grad_reduce_in_fp32", "false"}}),
      Alias("--hybrid-layer-pattern", "model.hybrid_layer_pattern"),
      Alias("--hybrid-override-pattern", "model.hybrid_layer_pattern"),
      Alias("--layernorm-epsilon", "model.layernorm_epsilon"),
      Alias("--grad-reduce-in-fp32", "ddp.grad_reduce_in_fp32"),
      Alias("--no-bias-swiglu-fusion", "model.bias_activation_fusion"),
      Without(Kind::kDropped, "--use-mcore-models", Arity::kNone, "there is one implementation"),
      Without(Kind::kDropped, "--spec", Arity::kMany, "the model follows from its keys"),
      Without(Kind::kDropped, "--enable-experimental", Arity::kNone, "there is no experimental switch"),
      Without(Kind::kDropped, "--cuda-graph-scope", Arity::kMany, "the engine chooses what it captures"),
      Without(Kind::kDropped, "--use-flash-attn", Arity::kNone, kernels),
      Without(Kind::kDropped, "--no-gradient-accumulation-fusion", Arity::kNone,
              "weight gradients are always rounded to the model's type and then summed in fp32, as with this flag"),
      Without(Kind::kDropped, "--overlap-p2p-communication", Arity::kNone, kernels),
      Without(Kind::kRefused, "--train-data-path", Arity::kMany, per_split),
      Without(Kind::kRefused, "--valid-data-path", Arity::kMany, per_split),
      Without(Kind::kRefused, "--test-data-path", Arity::kMany, per_split),
  };
}

Arity ArityOf(const Key& key) {
  if (key.TypeName() == "bool") return Arity::kNone;
  return key.TypeName().rfind("list", 0) == 0 ? Arity::kMany : Arity::kOne;
}

}  // namespace

const std::map<std::string, MegatronFlag>& MegatronFlags() {
  static const auto* flags = [] {
    auto* table = new std::map<std::string, MegatronFlag>();
    for (MegatronFlag& flag : OtherFlags()) table->emplace(flag.name, std::move(flag));
    for (const Key& key : Schema::Get().keys()) {
      if (key.info->mlm_flag().empty() || table->count(key.info->mlm_flag()) > 0) continue;
      MegatronFlag flag;
      flag.name = key.info->mlm_flag();
      flag.key = &key;
      flag.arity = ArityOf(key);
      if (key.info->effect() == v1::EFFECT_NONE) {
        flag.kind = Kind::kDropped;
        flag.note = key.info->instead();
      }
      table->emplace(flag.name, std::move(flag));
    }
    return table;
  }();
  return *flags;
}

Value MegatronDefault(const Key& key) {
  if (key.info->mlm_default().empty()) return key.Default();
  return ParseWord(key.info->mlm_default());
}

}  // namespace mbridge::recipes
