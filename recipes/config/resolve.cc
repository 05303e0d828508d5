#include "recipes/config/resolve.h"

#include <algorithm>
#include <map>
#include <set>

#include "mbridge/v1/options.pb.h"
#include "proto/rpc/status_details.h"
#include "recipes/config/assignment.h"
#include "recipes/config/config_state.h"
#include "recipes/config/derive.h"
#include "recipes/config/estimate.h"
#include "recipes/config/recipe_store.h"
#include "recipes/config/schema.h"
#include "recipes/config/text_form.h"
#include "recipes/config/validate.h"

namespace mbridge::recipes {
namespace {

constexpr size_t kMaxOverrides = 2000;

// Other places of a key: deprecated ones of Megatron-Bridge, and Megatron-LM's name of the sequence length.
const std::map<std::string, std::string>& MovedKeys() {
  static const std::map<std::string, std::string> moved = {{"train.eval_iters", "validation.eval_iters"},
                                                           {"train.eval_interval", "validation.eval_interval"},
                                                           {"train.skip_train", "validation.skip_train"},
                                                           {"dataset.sequence_length", "dataset.seq_length"}};
  return moved;
}

// mixed_precision=NAME and peft=NAME set this key of the group.
const std::map<std::string, std::string>& NamedGroups() {
  static const std::map<std::string, std::string> keys = {{"mixed_precision", "mixed_precision.preset"}, {"peft", "peft.scheme"}};
  return keys;
}

constexpr const char* kNestedModel = "model.transformer.";

// Writes assignments of one origin into the state; knows all other ways to write a key.
class Assigner {
 public:
  Assigner(bool nested_model_keys, ConfigState* state) : nested_model_keys_(nested_model_keys), state_(state) {}

  void Begin(v1::Origin origin, int level) {
    origin_ = origin;
    level_ = level;
    seen_.clear();
  }

  void Assign(const Assignment& assignment) {
    std::string key = assignment.key;
    if (nested_model_keys_ && key.starts_with(kNestedModel)) key = CanonicalKey(key);
    if (Schema::Get().IsGroup(key)) return AssignGroup(key, assignment);
    if (key.rfind("env_vars.", 0) == 0) return AssignEnvironment(key.substr(9), assignment);
    if (auto moved = MovedKeys().find(key); moved != MovedKeys().end() && !assignment.value.is_null()) {
      state_->RecordChange(key, assignment.value, Value::Null(), "moved to " + moved->second);
      key = moved->second;
    }
    const Key* known = Schema::Get().Find(key);
    if (known == nullptr) return Unknown(key, assignment);
    if (known->info->effect() == v1::EFFECT_NONE && !assignment.value.is_null()) return WithoutEffect(*known, assignment);
    AssignKnown(key, assignment);
  }

 private:
  void AssignKnown(const std::string& key, const Assignment& assignment) {
    const Key& known = *Schema::Get().Find(key);
    auto [first, is_new] = seen_.emplace(key, assignment.value);
    if (!is_new && !(first->second == assignment.value)) {
      state_->Fail(key, "is set twice, to " + FormatValue(first->second) + " and to " + FormatValue(assignment.value) +
                            "; keep one of them");
      v1::ConfigContainer scratch;  // The first value stands; what is wrong with this one is said too.
      if (auto wrong = WriteKey(known, assignment.value, &scratch)) state_->Fail(key, *wrong + Where(assignment));
      return;
    }
    if (assignment.value.is_null() && known.Works() && !known.info->default_value().empty()) {
      state_->Fail(key, "can't be null; expects " + known.TypeName() + ", its default is " + known.info->default_value());
      return;
    }
    state_->Set(key, assignment.value, origin_, assignment.source, level_);
  }

  // mixed_precision=NAME, a map of keys, or null for a group that may be absent.
  void AssignGroup(const std::string& group, const Assignment& assignment) {
    static const std::set<std::string> optional_groups = {
        "mixed_precision", "peft", "comm_overlap", "ft", "straggler", "nvrx_straggler", "tensor_inspect", "inprocess_restart"};
    const Value& value = assignment.value;
    if (value.kind == Value::Kind::kMap) {
      for (const auto& [name, item] : value.map) Assign({group + "." + name, item, assignment.source});
    } else if (value.is_null() && optional_groups.count(group) > 0) {
      for (const Key& key : Schema::Get().keys()) {
        if (key.group == group && state_->Has(key.path)) AssignKnown(key.path, {key.path, Value::Null(), assignment.source});
      }
    } else if (const auto named = NamedGroups().find(group); named != NamedGroups().end() && value.kind == Value::Kind::kString) {
      AssignKnown(named->second, {named->second, value, assignment.source});
    } else {
      state_->Fail(group, "is a group of keys and can't be " + FormatValue(value) + "; set " + group +
                              ".KEY, `mbctl recipe keys " + group + ".` lists them");
    }
  }

  void AssignEnvironment(const std::string& name, const Assignment& assignment) {
    Value map = state_->Get("env_vars");
    map.kind = Value::Kind::kMap;
    std::erase_if(map.map, [&name](const auto& entry) { return entry.key == name; });
    if (!assignment.value.is_null()) map.map.push_back({name, assignment.value});
    state_->Set("env_vars", map, origin_, assignment.source, level_);
  }

  void Unknown(const std::string& key, const Assignment& assignment) {
    state_->reason = v1::REASON_UNKNOWN_KEY;
    std::string text = "does not exist" + Where(assignment);
    const std::vector<std::string> near = Schema::Get().Nearest(key);
    for (size_t i = 0; i < near.size(); ++i)
      text += (i == 0 ? "; did you mean " : i + 1 == near.size() ? " or " : ", ") + near[i];
    if (!near.empty()) text += "?";
    if (key.rfind("model.transformer.", 0) == 0) text += "; this recipe has flat model keys: write model." + key.substr(18);
    state_->Fail(assignment.key, text + (near.empty() ? ";" : "") + " `mbctl recipe keys PATTERN` lists the keys");
  }

  void WithoutEffect(const Key& key, const Assignment& assignment) {
    if (state_->reason != v1::REASON_UNKNOWN_KEY) state_->reason = v1::REASON_KEY_WITHOUT_EFFECT;
    state_->Fail(key.path, "has no effect here" + Where(assignment) + ". " + key.info->instead());
  }

  std::string Where(const Assignment& assignment) const {
    return origin_ == v1::ORIGIN_OVERRIDE ? "" : " (" + assignment.source + ")";
  }

  bool nested_model_keys_;
  ConfigState* state_;
  v1::Origin origin_ = v1::ORIGIN_UNSPECIFIED;
  int level_ = 0;
  std::map<std::string, Value> seen_;
};

// Texts of the overrides that can't even be read, as one status; the others are assigned.
void AssignOverrides(const ResolveRequest& request, Assigner* assigner, ConfigState* state) {
  assigner->Begin(v1::ORIGIN_OVERRIDE, kOverride);
  for (size_t i = 0; i < request.overrides.size(); ++i) {
    absl::StatusOr<Assignment> assignment = ParseOverride(request.overrides[i]);
    if (!assignment.ok()) {
      state->Fail("overrides[" + std::to_string(i) + "]", std::string(assignment.status().message()));
      continue;
    }
    assigner->Assign(*assignment);
  }
}

absl::Status Unsupported(const std::string& recipe, const std::string& why, const std::vector<FieldViolation>& keys) {
  constexpr size_t kShown = 5;
  std::string text = recipe.empty() ? "" : "recipe " + recipe + " can't be trained yet: " + why;
  for (size_t i = 0; i < std::min(kShown, keys.size()); ++i)
    text += (text.empty() ? "" : "\n") + keys[i].field + " " + keys[i].description;
  if (keys.size() > kShown) text += "\nand " + std::to_string(keys.size() - kShown) + " more keys";
  return MakeStatus(absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_MODEL, text);
}

void FillValues(const ConfigState& state, v1::ResolvedConfig* resolved) {
  for (const Key& key : Schema::Get().keys()) {
    const Value value = ReadKey(state.config, key);
    auto setting = state.settings.find(key.path);
    const bool explicit_null = setting != state.settings.end() && setting->second.level > kDefault;
    if (value.is_null() && !explicit_null) continue;
    v1::ResolvedValue* entry = resolved->add_values();
    entry->set_key(key.path);
    entry->set_value(FormatValue(value));
    if (setting == state.settings.end()) continue;
    entry->set_origin(setting->second.origin);
    entry->set_source(setting->second.source);
  }
}

void DeriveAndValidate(const ResolveRequest& request, const std::string& recipe, ConfigState* state, Layout* layout) {
  ApplyDefaults(state);
  DerivePrecision(state);
  DeriveModel(state);
  DeriveData(state);
  DeriveOptimizer(state);
  DeriveSchedule(state);
  *layout = DeriveLayout(request.ranks, state);
  ValidateRequired(request.require_trainable, state);
  ValidateModel(state);
  ValidateCheckpoints(state);
  ValidateBatch(*layout, state);
  ValidateSchedule({recipe, request.overrides}, state);
}

}  // namespace

std::string CanonicalKey(const std::string& key) {
  if (key.starts_with(kNestedModel)) return "model." + key.substr(std::string_view(kNestedModel).size());
  if (const auto moved = MovedKeys().find(key); moved != MovedKeys().end()) return moved->second;
  if (const auto named = NamedGroups().find(key); named != NamedGroups().end()) return named->second;
  return key;
}

absl::StatusOr<v1::ResolvedConfig> Resolve(const ResolveRequest& request) {
  if (request.overrides.size() > kMaxOverrides) {
    return InvalidFields(v1::REASON_INVALID_CONFIG, {{"overrides", "are " + std::to_string(request.overrides.size()) +
                                                                       "; allowed: at most " + std::to_string(kMaxOverrides)}});
  }
  ConfigFile file;
  if (!request.config_yaml.empty()) {
    absl::StatusOr<ConfigFile> parsed = ParseConfigFile("config", request.config_yaml);
    if (!parsed.ok()) return InvalidFields(v1::REASON_INVALID_CONFIG, {{"config_yaml", std::string(parsed.status().message())}});
    file = *std::move(parsed);
  }
  const std::string recipe_name = request.recipe.empty() ? file.base : request.recipe;
  if (recipe_name.empty() && request.config_yaml.empty()) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNKNOWN_RECIPE,
                      "no recipe given; `mbctl recipe ls` lists the recipes");
  }
  std::vector<const ConfigFile*> chain;
  if (!recipe_name.empty()) {
    MB_ASSIGN_OR_RETURN(const ConfigFile* recipe, FindRecipeFile(recipe_name));
    MB_ASSIGN_OR_RETURN(chain, RecipeChain(*recipe));
  }
  if (request.require_trainable && request.kind != v1::JOB_KIND_PRETRAIN && request.kind != v1::JOB_KIND_UNSPECIFIED) {
    return MakeStatus(absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_JOB_KIND, "this version runs pretraining only");
  }

  ConfigState state;
  Assigner assigner(!chain.empty() && chain.back()->nested_model_keys, &state);
  for (size_t i = 0; i < chain.size(); ++i) {
    assigner.Begin(v1::ORIGIN_RECIPE, kRecipe + static_cast<int>(i));
    for (const Assignment& assignment : chain[i]->assignments) assigner.Assign(assignment);
  }
  assigner.Begin(v1::ORIGIN_FILE, kFile);
  for (const Assignment& assignment : file.assignments) assigner.Assign(assignment);
  AssignOverrides(request, &assigner, &state);

  Layout layout;
  DeriveAndValidate(request, recipe_name, &state, &layout);
  const std::vector<FieldViolation> unsupported =
      request.require_trainable ? UnsupportedKeys(state) : std::vector<FieldViolation>{};
  // What a recipe lacks is said together with the keys that need it; without such keys it can be trained.
  const bool recipe_waits = !unsupported.empty() && !chain.empty() && !chain.back()->not_trainable.empty();
  if (!state.violations.empty()) {
    if (!recipe_waits) state.violations.insert(state.violations.end(), unsupported.begin(), unsupported.end());
    return InvalidFields(state.reason, state.violations);
  }
  if (recipe_waits) return Unsupported(chain.back()->name, chain.back()->not_trainable, unsupported);
  if (!unsupported.empty()) return Unsupported("", "", unsupported);
  if (request.require_trainable && request.device == v1::DEVICE_CUDA) {
    const std::string missing = UnsupportedOnCuda(state.config.model());
    if (!missing.empty()) return MakeStatus(absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_MODEL, missing);
  }

  v1::ResolvedConfig resolved;
  resolved.set_recipe(chain.empty() ? "" : chain.back()->name);
  *resolved.mutable_config() = state.config;
  FillValues(state, &resolved);
  resolved.mutable_changes()->Assign(state.changes.begin(), state.changes.end());
  resolved.mutable_warnings()->Assign(state.warnings.begin(), state.warnings.end());
  *resolved.mutable_per_rank() = EstimateMemory(state.config, layout.data_parallel, request.device);
  resolved.set_ranks(layout.ranks);
  resolved.set_data_parallel_size(layout.data_parallel);
  resolved.set_flops_per_token(FlopsPerToken(state.config.model()));
  resolved.set_config_hash(ConfigHash(state.config, layout.ranks));
  return resolved;
}

absl::StatusOr<v1::ResolvedConfig> ResolveAgain(const v1::ResolvedConfig& resolved, const std::vector<std::string>& overrides,
                                                int ranks) {
  ResolveRequest request;
  request.recipe = resolved.recipe();
  request.config_yaml = "{}";  // A job may have had a file and no recipe.
  request.ranks = ranks;
  for (const v1::ResolvedValue& value : resolved.values()) {
    if (value.origin() != v1::ORIGIN_FILE && value.origin() != v1::ORIGIN_OVERRIDE) continue;
    const std::string line = value.key() + "=";
    const bool replaced =
        std::any_of(overrides.begin(), overrides.end(), [&](const auto& other) { return other.starts_with(line); });
    if (!replaced) request.overrides.push_back(line + value.value());
  }
  request.overrides.insert(request.overrides.end(), overrides.begin(), overrides.end());
  return Resolve(request);
}

}  // namespace mbridge::recipes
