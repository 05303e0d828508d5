#include <algorithm>
#include <map>
#include <set>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/options.pb.h"
#include "recipes/config/flag_table.h"
#include "recipes/config/text_form.h"
#include "recipes/config/translate.h"

namespace mbridge::recipes {
namespace {

class ReverseTranslator {
 public:
  explicit ReverseTranslator(const v1::ResolvedConfig& resolved) : resolved_(resolved), config_(resolved.config()) {
    for (const v1::ResolvedValue& value : resolved.values()) derived_[value.key()] = value.origin() == v1::ORIGIN_DERIVED;
  }

  MegatronLine Run() {
    AddSpecial();
    for (const Key& key : Schema::Get().keys()) AddKey(key);
    AddNotes();
    return line_;
  }

 private:
  void AddSpecial() {
    const v1::ModelConfig& model = config_.model();
    if (model.bf16()) Add("--bf16");
    if (model.fp16()) Add("--fp16");
    Add("--seq-length", std::to_string(model.seq_length()));
    Add("--max-position-embeddings", std::to_string(model.seq_length()));  // Needed whatever the positions are.
    if (model.num_query_groups() != model.num_attention_heads()) {
      Add("--group-query-attention");
      Add("--num-query-groups", std::to_string(model.num_query_groups()));
    }
    if (model.gated_linear_unit() && model.activation_func() == "silu") Add("--swiglu");
    if (!model.gated_linear_unit() && model.activation_func() == "squared_relu") Add("--squared-relu");
    if (config_.optimizer().use_distributed_optimizer()) Add("--use-distributed-optimizer");
    if (!config_.ddp().check_for_nan_in_grad()) Add("--no-check-for-nan-in-loss-and-grad");
    if (config_.ddp().check_for_nan_in_grad() != config_.rerun_state_machine().check_for_nan_in_loss()) {
      line_.notes.push_back("Megatron-LM has one switch for the NaN checks of loss and gradients");
    }
    Add("--seed", std::to_string(config_.rng().seed()));
    if (config_.dataset().random_seed() != config_.rng().seed()) {
      line_.notes.push_back("dataset.random_seed=" + std::to_string(config_.dataset().random_seed()) +
                            ": Megatron-LM orders the data by --seed");
    }
    AddData();
  }

  void AddData() {
    const v1::DatasetConfig& dataset = config_.dataset();
    if (dataset.mock()) return Add("--mock-data");
    std::vector<std::string> parts = {"--data-path"};
    for (int i = 0; i < dataset.blend().prefixes_size(); ++i) {
      if (i < dataset.blend().weights_size()) parts.push_back(FormatDouble(dataset.blend().weights(i)));
      parts.push_back(dataset.blend().prefixes(i));
    }
    line_.arguments.insert(line_.arguments.end(), parts.begin(), parts.end());
    if (dataset.has_split()) Add("--split", dataset.split());
  }

  // Values that Megatron-LM computes the same way by itself.
  bool Follows(const std::string& key) const {
    static const std::set<std::string> always = {"dataset.mock",
                                                 "dataset.data_path",
                                                 "dataset.split",
                                                 "rng.seed",
                                                 "ddp.use_distributed_optimizer",
                                                 "ddp.check_for_nan_in_grad",
                                                 "model.num_query_groups",
                                                 "ddp.grad_reduce_in_fp32",
                                                 "model.moe_layer_freq"};
    static const std::set<std::string> when_derived = {
        "model.ffn_hidden_size",          "model.kv_channels",          "model.vocab_size",
        "scheduler.lr_decay_iters",       "scheduler.lr_decay_samples", "scheduler.lr_wsd_decay_iters",
        "scheduler.lr_wsd_decay_samples", "train.train_iters",          "model.expert_tensor_parallel_size",
        "model.embedding_init_method_std"};
    if (always.count(key) > 0) return true;
    const bool weight_decay = key == "scheduler.start_weight_decay" || key == "scheduler.end_weight_decay";
    if (weight_decay) return config_.scheduler().weight_decay_incr_style() == "constant";
    const auto derived = derived_.find(key);
    return when_derived.count(key) > 0 && derived != derived_.end() && derived->second;
  }

  void AddKey(const Key& key) {
    if (key.info->mlm_flag().empty() || key.info->effect() == v1::EFFECT_NONE || Follows(key.path)) return;
    const Value value = ReadKey(config_, key);
    if (value.is_null() || value == MegatronDefault(key)) return;
    if (key.TypeName() == "bool") {
      // A switch can only be thrown in one direction.
      const bool off = key.info->mlm_rule() == "invert";
      if (value.boolean != off) Add(key.info->mlm_flag());
      return;
    }
    if (value.kind == Value::Kind::kList) {
      line_.arguments.push_back(key.info->mlm_flag());
      for (const Value& item : value.list)
        line_.arguments.push_back(item.kind == Value::Kind::kString ? item.text : FormatValue(item));
      return;
    }
    Add(key.info->mlm_flag(), value.kind == Value::Kind::kString ? value.text : FormatValue(value));
  }

  void AddNotes() {
    if (config_.checkpoint().most_recent_k() >= 0)
      line_.notes.push_back("checkpoint.most_recent_k: Megatron-LM keeps every checkpoint");
    if (config_.scheduler().has_max_steps())
      line_.notes.push_back("scheduler.max_steps has no flag; --lr-decay-iters says the length of the decay");
    if (config_.model().moe_layer_freq_size() > 0) {
      std::string pattern = FormatValue(ReadKey(config_, *Schema::Get().Find("model.moe_layer_freq")));
      Add("--moe-layer-freq", pattern);
    }
    if (config_.tokenizer().tokenizer_type() == "ByteLevelTokenizer")
      line_.notes.push_back("Megatron-LM has no ByteLevelTokenizer; its data are read with NullTokenizer and --vocab-size 257");
    line_.notes.push_back(
        "equal losses also need --no-gradient-accumulation-fusion, and --no-masked-softmax-fusion --no-persist-layer-norm where "
        "Apex is missing (docs/megatron-lm.md)");
  }

  void Add(const std::string& flag) { line_.arguments.push_back(flag); }
  void Add(const std::string& flag, const std::string& value) {
    line_.arguments.push_back(flag);
    line_.arguments.push_back(value);
  }

  const v1::ResolvedConfig& resolved_;
  const v1::ConfigContainer& config_;
  std::map<std::string, bool> derived_;
  MegatronLine line_;
};

}  // namespace

std::string MegatronLine::CommandLine() const {
  std::string text = "pretrain_gpt.py";
  for (const std::string& argument : arguments) text += " " + ShellQuote(argument);
  return text;
}

MegatronLine TranslateToMegatron(const v1::ResolvedConfig& resolved) { return ReverseTranslator(resolved).Run(); }

}  // namespace mbridge::recipes
