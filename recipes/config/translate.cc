#include "recipes/config/translate.h"

#include <algorithm>
#include <set>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/options.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/flag_table.h"
#include "recipes/config/recipe_store.h"
#include "recipes/config/text_form.h"

namespace mbridge::recipes {
namespace {

using Arity = MegatronFlag::Arity;
using Kind = MegatronFlag::Kind;

constexpr const char* kRecipe = "vanilla_gpt_megatron_lm_config";

std::string WithDashes(std::string flag) {
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

bool IsFlag(const std::string& word) { return word.size() > 2 && word[0] == '-' && word[1] == '-'; }

// 27, [0,1,1] or Python's ([0]*1+[1]*26); null when it is none of these.
Value ParseLayerPattern(const std::string& text) {
  std::string expression;
  for (char c : text) {
    if (c != '(' && c != ')' && c != ' ') expression += c;
  }
  if (Value word = ParseWord(expression); word.kind == Value::Kind::kInt) return word;
  std::vector<Value> items;
  for (size_t at = 0; at < expression.size();) {
    const size_t close = expression.find(']', at);
    if (expression[at] != '[' || close == std::string::npos) return Value::Null();
    absl::StatusOr<Value> list = ParseValue(expression.substr(at, close - at + 1));
    if (!list.ok()) return Value::Null();
    at = close + 1;
    int64_t times = 1;
    if (at < expression.size() && expression[at] == '*') {
      const size_t end = std::min(expression.find('+', at), expression.size());
      const Value count = ParseWord(expression.substr(at + 1, end - at - 1));
      if (count.kind != Value::Kind::kInt || count.integer < 0 || count.integer > 10000) return Value::Null();
      times = count.integer;
      at = end;
    }
    for (int64_t i = 0; i < times; ++i) items.insert(items.end(), list->list.begin(), list->list.end());
    if (items.size() > 10000) return Value::Null();
    if (at < expression.size() && expression[at++] != '+') return Value::Null();
  }
  return Value::List(items);
}

// What the recipe sets, bases included.
std::map<std::string, Value> RecipeValues() {
  std::map<std::string, Value> values;
  absl::StatusOr<const ConfigFile*> recipe = FindRecipeFile(kRecipe);
  if (!recipe.ok()) return values;
  absl::StatusOr<std::vector<const ConfigFile*>> chain = RecipeChain(**recipe);
  if (!chain.ok()) return values;
  for (const ConfigFile* file : *chain) {
    for (const Assignment& assignment : file->assignments) values[assignment.key] = assignment.value;
  }
  return values;
}

class Translator {
 public:
  absl::StatusOr<Translation> Run(std::vector<std::string> words) {
    result_.recipe = kRecipe;
    TakeLauncher(&words);
    for (size_t at = 0; at < words.size();) at = TakeFlag(words, at);
    Finish();
    if (!unknown_.empty()) return InvalidFields(v1::REASON_UNKNOWN_KEY, unknown_);
    if (!wrong_.empty()) return InvalidFields(v1::REASON_INVALID_CONFIG, wrong_);
    return result_;
  }

 private:
  // Everything up to the training script: variables, torchrun and its own flags.
  void TakeLauncher(std::vector<std::string>* words) {
    const auto is_script = [](const std::string& word) {
      return word.size() > 3 && word.compare(word.size() - 3, 3, ".py") == 0 && word[0] != '-';
    };
    const auto script = std::find_if(words->begin(), words->end(), is_script);
    if (script == words->end()) return;
    int64_t per_node = 0, nodes = 1;
    for (auto it = words->begin(); it != script; ++it) {
      std::string flag = WithDashes(it->substr(0, it->find('=')));
      const bool inside = it->find('=') != std::string::npos;
      const std::string value = inside ? it->substr(it->find('=') + 1) : std::next(it) != script ? *std::next(it) : "";
      const Value number = ParseWord(value);
      if (number.kind != Value::Kind::kInt || number.integer < 1 || number.integer > 1 << 20) continue;
      if (flag == "--nproc-per-node") per_node = number.integer;
      if (flag == "--nnodes") nodes = number.integer;
    }
    if (per_node > 0) result_.ranks = static_cast<int>(std::min<int64_t>(per_node * nodes, 1 << 20));
    words->erase(words->begin(), std::next(script));
  }

  // Returns the index after the flag and its values.
  size_t TakeFlag(const std::vector<std::string>& words, size_t at) {
    if (words[at] == "--") return at + 1;
    if (!IsFlag(words[at])) {
      Wrong(words[at], "is not a flag and follows none that takes it");
      return at + 1;
    }
    const size_t equals = words[at].find('=');
    const std::string name = WithDashes(words[at].substr(0, equals));
    std::vector<std::string> values;
    if (equals != std::string::npos) values.push_back(words[at].substr(equals + 1));
    size_t next = at + 1;
    const auto known = MegatronFlags().find(name);
    if (known == MegatronFlags().end()) {
      while (next < words.size() && !IsFlag(words[next])) ++next;
      Unknown(name);
      return next;
    }
    const MegatronFlag& flag = known->second;
    const bool wants_more = flag.arity == Arity::kMany || (flag.arity == Arity::kOne && values.empty());
    if (wants_more && equals == std::string::npos) {
      while (next < words.size() && !IsFlag(words[next])) {
        values.push_back(words[next++]);
        if (flag.arity == Arity::kOne) break;
      }
    }
    if (flag.arity == Arity::kNone ? !values.empty() : values.empty()) {
      Wrong(name, flag.arity == Arity::kNone ? "takes no value" : "needs a value");
    } else {
      Apply(flag, values);
    }
    return next;
  }

  void Apply(const MegatronFlag& flag, const std::vector<std::string>& values) {
    if (!seen_.emplace(flag.name, values).second) {
      if (seen_[flag.name] != values) Wrong(flag.name, "is given twice with different values");
      return;
    }
    switch (flag.kind) {
      case Kind::kKey: return ApplyKey(flag, values);
      case Kind::kFixed:
        for (const auto& [key, value] : flag.fixed) Set(key, value);
        if (!flag.note.empty()) Note(flag.name, flag.note);
        return;
      case Kind::kDropped: return Note(flag.name, "left out: " + flag.note);
      case Kind::kRefused: return Wrong(flag.name, "can't be translated: " + flag.note);
      case Kind::kSpecial: return ApplySpecial(flag, values);
    }
  }

  void ApplyKey(const MegatronFlag& flag, const std::vector<std::string>& values) {
    const Key& key = *flag.key;
    if (flag.arity == Arity::kNone)
      return Set(key.path, key.info->mlm_rule() == "invert" || flag.name.rfind("--no-", 0) == 0 ? "false" : "true");
    Value value = Value::String(values[0]);
    if (flag.arity == Arity::kMany) {
      value = Value::List({});
      for (const std::string& word : values) {
        absl::StatusOr<Value> item = word.empty() ? absl::StatusOr<Value>(Value::String("")) : ParseValue(word);
        if (values.size() == 1 && item.ok() && item->kind == Value::Kind::kList) {
          value = *item;
          break;
        }
        value.list.push_back(item.ok() ? *item : Value::String(word));
      }
    } else if (key.TypeName() != "text") {
      value = ParseWord(values[0]);
    }
    v1::ConfigContainer scratch;
    if (auto wrong = WriteKey(key, value, &scratch)) return Wrong(flag.name, *wrong + " (" + key.path + ")");
    Set(key.path, FormatValue(ReadKey(scratch, key)));
    if (key.path == "optimizer.weight_decay") {
      Note(flag.name, "this value counts here; in Bridge the recipe's scheduler replaces it by 0.033");
    }
    if (key.path == "checkpoint.save")
      Note(flag.name, "the directory must lie in a root of the coordinator; without it each run has a private directory");
  }

  void ApplySpecial(const MegatronFlag& flag, const std::vector<std::string>& values) {
    const Value number = ParseWord(values.empty() ? "0" : values[0]);
    if (flag.name == "--load") return Note(flag.name, "left out: " + flag.note);
    if (flag.name == "--moe-layer-freq") {
      const Value pattern = ParseLayerPattern(values[0]);
      if (pattern.is_null()) return Wrong(flag.name, "is " + values[0] + "; expects a number or a list like ([0]*1+[1]*26)");
      return Set("model.moe_layer_freq", FormatValue(pattern));
    }
    if (number.kind != Value::Kind::kInt || number.integer < 0)
      return Wrong(flag.name, "is " + values[0] + "; expects a whole number");
    numbers_[flag.name] = number.integer;
    if (flag.name == "--seq-length") Set("dataset.seq_length", values[0]);
    if (flag.name == "--seed") {
      Set("rng.seed", values[0]);
      Set("dataset.random_seed", values[0]);
    }
  }

  void Finish() {
    FinishModel();
    FinishLengths();
    if (seen_.count("--bf16") + seen_.count("--fp16") == 0) Set("mixed_precision", "fp32");
    if (seen_.count("--bf16") + seen_.count("--fp16") == 2) Wrong("--fp16", "and --bf16 exclude each other");
    FinishDefaults();
  }

  void FinishModel() {
    for (const char* flag :
         {"--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--lr"}) {
      if (seen_.count(flag) == 0) Wrong(flag, "is missing; Megatron-LM needs it");
    }
    const auto position = overrides_.find("model.position_embedding_type");
    const bool position_table = position == overrides_.end() || position->second == "learned_absolute";
    if (position_table && numbers_.count("--max-position-embeddings") > 0 &&
        numbers_["--max-position-embeddings"] != numbers_["--seq-length"]) {
      Wrong("--max-position-embeddings", "is " + std::to_string(numbers_["--max-position-embeddings"]) + " but --seq-length is " +
                                             std::to_string(numbers_["--seq-length"]) +
                                             "; here the position table has as many rows as a sample has tokens");
    }
    if (seen_.count("--group-query-attention") > 0) {
      Set("model.num_query_groups",
          std::to_string(numbers_.count("--num-query-groups") > 0 ? numbers_["--num-query-groups"] : 1));
    } else if (numbers_.count("--num-query-groups") > 0) {
      Note("--num-query-groups", "left out: Megatron-LM ignores it without --group-query-attention");
    }
    if (numbers_.count("--num-layers-per-virtual-pipeline-stage") > 0) {
      const int64_t per_stage = numbers_["--num-layers-per-virtual-pipeline-stage"];
      const int64_t layers = ParseWord(overrides_["model.num_layers"]).integer;
      const int64_t stages = std::max<int64_t>(1, ParseWord(overrides_["model.pipeline_model_parallel_size"]).integer);
      if (per_stage < 1 || layers % (stages * per_stage) != 0) {
        return Wrong("--num-layers-per-virtual-pipeline-stage",
                     "is " + std::to_string(per_stage) + "; the layers of a pipeline stage must be a multiple of it");
      }
      Set("model.virtual_pipeline_model_parallel_size", std::to_string(layers / stages / per_stage));
    }
  }

  void FinishLengths() {
    if (seen_.count("--train-iters") + seen_.count("--train-samples") == 0)
      Wrong("--train-iters", "is missing (or --train-samples)");
    if (seen_.count("--global-batch-size") > 0 || overrides_.count("train.micro_batch_size") == 0) return;
    int64_t model_ranks = 1;
    for (const char* key :
         {"model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.context_parallel_size"}) {
      if (overrides_.count(key) > 0) model_ranks *= std::clamp<int64_t>(ParseWord(overrides_[key]).integer, 1, 1 << 16);
    }
    const int64_t data_parallel = std::max<int64_t>(1, result_.ranks / model_ranks);
    const int64_t batch = std::min<int64_t>(ParseWord(overrides_["train.micro_batch_size"]).integer, 1 << 24) * data_parallel;
    Set("train.global_batch_size", std::to_string(batch));
    Note("--global-batch-size", "is missing: Megatron-LM takes micro batch size * data-parallel size = " + std::to_string(batch));
  }

  // Where the line says nothing, Megatron-LM's default counts, not the recipe's value.
  void FinishDefaults() {
    static const std::set<std::string> handled = {
        "train.train_iters", "train.train_samples",   "train.global_batch_size", "train.micro_batch_size",
        "optimizer.lr",      "dataset.mock",          "dataset.split",           "tokenizer.tokenizer_type",
        "rng.seed",          "model.num_query_groups"};
    const std::map<std::string, Value> recipe = RecipeValues();
    for (const Key& key : Schema::Get().keys()) {
      if (!key.Works() || key.info->mlm_flag().empty() || overrides_.count(key.path) > 0 || handled.count(key.path) > 0) continue;
      const auto set = recipe.find(key.path);
      const Value here = set == recipe.end() ? key.Default() : set->second;
      if (const Value there = MegatronDefault(key); here != there) Set(key.path, FormatValue(there));
    }
    if (seen_.count("--data-path") > 0 && seen_.count("--split") == 0) Set("dataset.split", "'969, 30, 1'");
  }

  void Set(const std::string& key, const std::string& value) {
    if (auto [entry, is_new] = overrides_.emplace(key, value); !is_new) {
      if (entry->second != value) Wrong(key, "would be set to " + entry->second + " and to " + value + " by different flags");
      return;
    }
    result_.overrides.push_back(key + "=" + value);
  }

  void Note(const std::string& flag, const std::string& text) { result_.notes.push_back(flag + ": " + text); }
  void Wrong(const std::string& flag, const std::string& text) { wrong_.push_back({flag, text}); }

  void Unknown(const std::string& flag) {
    std::vector<std::string> names;
    for (const auto& [name, unused] : MegatronFlags()) names.push_back(name);
    unknown_.push_back({flag, "is no flag that can be translated" + DidYouMean(flag, names)});
  }

  Translation result_;
  std::map<std::string, std::string> overrides_;
  std::map<std::string, std::vector<std::string>> seen_;
  std::map<std::string, int64_t> numbers_;
  std::vector<FieldViolation> unknown_, wrong_;
};

}  // namespace

std::string Translation::CommandLine() const {
  std::string text = "mbctl submit --recipe " + recipe;
  if (ranks > 0) text += " --ranks " + std::to_string(ranks);
  for (const std::string& line : overrides) text += " " + ShellQuote(line);
  return text;
}

absl::StatusOr<Translation> TranslateFromMegatron(const std::string& line) {
  absl::StatusOr<std::vector<std::string>> words = SplitShellWords(line);
  if (!words.ok()) return InvalidFields(v1::REASON_INVALID_CONFIG, {{"arguments", std::string(words.status().message())}});
  return Translator().Run(*std::move(words));
}

std::vector<FlagRow> FlagRows() {
  std::vector<FlagRow> rows;
  for (const auto& [name, flag] : MegatronFlags()) {
    FlagRow row{name, "", "", flag.note};
    if (flag.key != nullptr && flag.kind == Kind::kKey) {
      const bool off = flag.arity == Arity::kNone && (flag.key->info->mlm_rule() == "invert" || name.rfind("--no-", 0) == 0);
      row.keys = flag.key->path + (off ? "=false" : flag.arity == Arity::kNone ? "=true" : "");
      row.group = flag.key->group;
      if (flag.key->info->effect() == v1::EFFECT_PLANNED) row.note = "not yet";
      if (flag.key->Works() && !flag.key->info->mlm_default().empty())
        row.note = "Megatron-LM's default is " + flag.key->info->mlm_default();
    }
    if (flag.kind == Kind::kDropped && flag.key != nullptr) row.group = flag.key->group;
    for (const auto& [key, value] : flag.fixed) row.keys += (row.keys.empty() ? "" : ", ") + key + "=" + value;
    if (flag.kind == Kind::kSpecial) row.keys = flag.keys;
    if (row.group.empty()) row.group = row.keys.empty() ? "other" : row.keys.substr(0, row.keys.find_first_of(".="));
    rows.push_back(row);
  }
  return rows;
}

}  // namespace mbridge::recipes
