// The rotation in config.json.
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "engine/bridge/config_keys.h"
#include "engine/model/rotary_tables.h"

namespace mbridge {
namespace {

// A rotation of transformers: the keys of one object of rope_parameters.
class RopeReader {
 public:
  RopeReader(ConfigReader* from, std::string object, GptConfig* to) : from_(from), object_(std::move(object)), to_(to) {}

  void Read(RopeDefaults defaults) {
    RefuseUnknown();
    const std::string type = from_->Text(Key("rope_type"), "default");
    to_->rotary_base = from_->Real(Key("rope_theta"), &defaults.base);
    const double percent = from_->Real("partial_rotary_factor", &defaults.percent);
    to_->rotary_percent = from_->Real(Key("partial_rotary_factor"), &percent);
    if (type == "linear") {
      to_->seq_len_interpolation_factor = from_->Real(Key("factor"));
    } else if (type == "dynamic") {
      to_->rope_dynamic_factor = from_->Real(Key("factor"));
      to_->rope_original_length = static_cast<double>(to_->max_position_embeddings);
    } else if (type == "llama3") {
      to_->rope_scaling = true;
      to_->rope_scaling_factor = from_->Real(Key("factor"));
      to_->rope_low_freq_factor = from_->Real(Key("low_freq_factor"));
      to_->rope_high_freq_factor = from_->Real(Key("high_freq_factor"));
      to_->rope_original_length = OriginalLength();
    } else if (type == "yarn") {
      ReadYarn();
    } else if (type == "longrope" || type == "su") {  // "su": its name in the first Phi-3 files.
      ReadLongRope();
    } else if (type != "default") {
      from_->Unsupported(Key("rope_type"), "default, linear, dynamic, llama3, yarn or longrope");
    }
  }

 private:
  std::string Key(const char* name) const { return object_ + "/" + name; }

  void RefuseUnknown() {
    static const std::set<std::string> kKnown = {"rope_type",
                                                 "type",
                                                 "rope_theta",
                                                 "partial_rotary_factor",
                                                 "factor",
                                                 "low_freq_factor",
                                                 "beta_fast",
                                                 "high_freq_factor",
                                                 "original_max_position_embeddings",
                                                 "beta_slow",
                                                 "attention_factor",
                                                 "mscale",
                                                 "mscale_all_dim",
                                                 "truncate",
                                                 "short_factor",
                                                 "long_factor"};
    const Json& object = from_->Get(object_);
    if (!object.is_object()) return;
    for (const auto& [name, value] : object.items()) {
      if (!kKnown.contains(name) && !value.is_null()) from_->Fault(Key(name.c_str()), "is not known");
    }
  }

  double OriginalLength() {
    const auto absent = static_cast<double>(to_->max_position_embeddings);
    const double inside = from_->Real(Key("original_max_position_embeddings"), &absent);
    return from_->Real("original_max_position_embeddings", &inside);  // Phi-3's place, which has priority.
  }

  // Factors of null mean the ratio of the lengths.
  double Factor() {
    const double ratio = static_cast<double>(to_->max_position_embeddings) / to_->rope_original_length;
    return from_->Real(Key("factor"), &ratio);
  }

  void ReadYarn() {
    const double none = 0, fast = 32, slow = 1;
    const bool yes = true;
    to_->rope_original_length = OriginalLength();
    to_->yarn_rotary_scaling_factor = Factor();
    to_->yarn_beta_fast = from_->Real(Key("beta_fast"), &fast);
    to_->yarn_beta_slow = from_->Real(Key("beta_slow"), &slow);
    to_->yarn_correction_range_round_to_int = from_->Flag(Key("truncate"), &yes);
    const double mscale = from_->Real(Key("mscale"), &none), all = from_->Real(Key("mscale_all_dim"), &none);
    const double attention = YarnAttentionFactor(to_->yarn_rotary_scaling_factor, mscale, all);
    to_->rope_attention_factor = from_->Real(Key("attention_factor"), &attention);
  }

  void ReadLongRope() {
    to_->rope_original_length = OriginalLength();
    const double factor = Factor();
    const double attention =
        factor <= 1 ? 1.0 : std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(to_->rope_original_length)));
    to_->rope_attention_factor = from_->Real(Key("attention_factor"), &attention);
    to_->long_rope_short_factors = Factors("short_factor");
    to_->long_rope_long_factors = Factors("long_factor");
  }

  std::vector<double> Factors(const char* name) {
    std::vector<double> factors;
    const Json& list = from_->Get(Key(name));
    bool numbers = list.is_array() && !list.empty();
    if (numbers) {
      for (const Json& value : list) {
        numbers = numbers && value.is_number();
        factors.push_back(value.is_number() ? value.get<double>() : 0.0);
      }
    }
    if (!numbers) from_->Unsupported(Key(name), "a list of numbers");
    return factors;
  }

  ConfigReader* from_;
  std::string object_;
  GptConfig* to_;
};

Json WriteRope(const GptConfig& from, const RopeDefaults& defaults, Json* config) {
  Json rope = {{"rope_theta", from.rotary_base}, {"rope_type", "default"}};
  if (from.rotary_percent != 1.0 || defaults.percent != 1.0) rope["partial_rotary_factor"] = from.rotary_percent;
  const auto original = static_cast<int64_t>(from.rope_original_length);
  if (from.seq_len_interpolation_factor > 0) {
    rope["rope_type"] = "linear";
    rope["factor"] = from.seq_len_interpolation_factor;
  } else if (from.rope_dynamic_factor > 0) {
    rope["rope_type"] = "dynamic";
    rope["factor"] = from.rope_dynamic_factor;
    (*config)["max_position_embeddings"] = original;
  } else if (from.rope_scaling) {
    rope["rope_type"] = "llama3";
    rope["factor"] = from.rope_scaling_factor;
    rope["low_freq_factor"] = from.rope_low_freq_factor;
    rope["high_freq_factor"] = from.rope_high_freq_factor;
    rope["original_max_position_embeddings"] = original;
  } else if (from.yarn_rotary_scaling_factor > 0) {
    rope["rope_type"] = "yarn";
    rope["factor"] = from.yarn_rotary_scaling_factor;
    rope["beta_fast"] = from.yarn_beta_fast;
    rope["beta_slow"] = from.yarn_beta_slow;
    rope["attention_factor"] = from.rope_attention_factor;
    rope["truncate"] = from.yarn_correction_range_round_to_int;
    rope["original_max_position_embeddings"] = original;
  } else if (!from.long_rope_short_factors.empty()) {
    rope["rope_type"] = "longrope";
    rope["short_factor"] = from.long_rope_short_factors;
    rope["long_factor"] = from.long_rope_long_factors;
    rope["attention_factor"] = from.rope_attention_factor;
    rope["original_max_position_embeddings"] = original;
    (*config)["original_max_position_embeddings"] = original;
  }
  return rope;
}

}  // namespace

ConfigKey RopeKey(RopeDefaults defaults) {
  const auto read = [defaults](ConfigReader* from, GptConfig* to) { RopeReader(from, "rope_parameters", to).Read(defaults); };
  const auto write = [defaults](const GptConfig& from, Json* to) { (*to)["rope_parameters"] = WriteRope(from, defaults, to); };
  return CustomKey({"rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}, read, write);
}

ConfigKey LayeredRopeKey(double base, double local_base) {
  const RopeDefaults defaults{.base = base};
  const auto read = [=](ConfigReader* from, GptConfig* to) {
    const Json& local = from->Get("rope_parameters/sliding_attention");
    if (local.is_object() && local.value("rope_type", "default") != "default") {
      from->Unsupported("rope_parameters/sliding_attention/rope_type", "default");
    }
    RopeReader(from, "rope_parameters/full_attention", to).Read(defaults);
    to->rotary_base_local = from->Real("rope_parameters/sliding_attention/rope_theta", &local_base);
  };
  const auto write = [=](const GptConfig& from, Json* to) {
    (*to)["rope_parameters"] = {{"full_attention", WriteRope(from, defaults, to)},
                                {"sliding_attention", {{"rope_theta", from.rotary_base_local}, {"rope_type", "default"}}}};
  };
  return CustomKey({"rope_parameters"}, read, write);
}

}  // namespace mbridge
