// The Llama family against Hugging Face transformers: logits, loss and every gradient of tiny fp32 models (tests/data/hf).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/bridge/safetensors.h"
#include "engine/core/parameter.h"
#include "engine/model/gpt_model.h"

namespace mbridge {
namespace {

using nlohmann::json;
using Values = std::vector<float>;

std::string Path(const std::string& model, const std::string& file) {
  return fmt::format("{}/tests/data/hf/{}/{}", MB_SOURCE_DIR, model, file);
}

template <class T> std::vector<T> ReadAs(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry* entry = file.Find(name);
  if (entry == nullptr) {
    ADD_FAILURE() << file.path() << " has no " << name;
    return {};
  }
  std::vector<T> values(static_cast<size_t>(entry->NumElements()));
  EXPECT_EQ(static_cast<size_t>(entry->bytes), values.size() * sizeof(T)) << name;
  EXPECT_TRUE(file.Read(*entry, values.data()).ok()) << name;
  return values;
}

GptConfig ConfigOf(const json& hf, int64_t seq_length) {
  GptConfig c;
  c.num_layers = hf.at("num_hidden_layers");
  c.hidden_size = hf.at("hidden_size");
  c.num_attention_heads = hf.at("num_attention_heads");
  c.num_query_groups = hf.at("num_key_value_heads");
  c.kv_channels = hf.value("head_dim", c.hidden_size / c.num_attention_heads);
  c.ffn_hidden_size = hf.at("intermediate_size");
  c.seq_length = seq_length;
  c.padded_vocab_size = hf.at("vocab_size");
  c.normalization = NormKind::kRmsNorm;
  c.activation = ActivationKind::kSwiGlu;
  c.position_embedding = PositionKind::kRope;
  const std::string type = hf.at("model_type");
  c.add_bias_linear = hf.value("mlp_bias", false);
  c.add_qkv_bias = type == "qwen2";
  c.qk_layernorm = type == "qwen3";
  if (hf.contains("sliding_window") && hf["sliding_window"].is_number()) c.attention_window = hf["sliding_window"];
  c.tied_embeddings = hf.at("tie_word_embeddings");
  c.layernorm_epsilon = hf.at("rms_norm_eps");
  const json& rope = hf.at("rope_parameters");
  c.rotary_base = rope.at("rope_theta");
  if (rope.at("rope_type") == "llama3") {
    c.rope_scaling = true;
    c.rope_scaling_factor = rope.at("factor");
    c.rope_low_freq_factor = rope.at("low_freq_factor");
    c.rope_high_freq_factor = rope.at("high_freq_factor");
    c.rope_original_length = rope.at("original_max_position_embeddings");
  }
  c.hidden_dropout = c.attention_dropout = 0.0;
  c.dtype = DType::kF32;
  return c;
}

// Reads a tensor by its Hugging Face name: a weight, or its gradient.
using Source = std::function<Values(const std::string& name)>;

// Values of our parameter from theirs: the query-key-value layer holds per group its queries, key and value, the first MLP layer
// the gate above the linear half.
Values FromHuggingFace(const GptConfig& c, const std::string& ours, const Source& read) {
  static const std::map<std::string, std::string> kNames = {{"self_attention.linear_proj", "self_attn.o_proj"},
                                                            {"mlp.linear_fc2", "mlp.down_proj"},
                                                            {"self_attention.q_layernorm", "self_attn.q_norm"},
                                                            {"self_attention.k_layernorm", "self_attn.k_norm"},
                                                            {"input_layernorm", "input_layernorm"},
                                                            {"pre_mlp_layernorm", "post_attention_layernorm"}};
  if (ours == "embedding.word_embeddings.weight") return read("model.embed_tokens.weight");
  if (ours == "output_layer.weight") return read("lm_head.weight");
  if (ours == "decoder.final_layernorm.weight") return read("model.norm.weight");
  const std::string start = "decoder.layers.";
  const size_t layer_end = ours.find('.', start.size()), kind_begin = ours.rfind('.');
  const std::string layer = "model." + ours.substr(8, layer_end - 8), kind = ours.substr(kind_begin);
  const std::string part = ours.substr(layer_end + 1, kind_begin - layer_end - 1);
  if (part == "mlp.linear_fc1") {
    Values gate = read(layer + ".mlp.gate_proj" + kind);
    const Values up = read(layer + ".mlp.up_proj" + kind);
    gate.insert(gate.end(), up.begin(), up.end());
    return gate;
  }
  if (part == "self_attention.linear_qkv") {
    const Values q = read(layer + ".self_attn.q_proj" + kind), k = read(layer + ".self_attn.k_proj" + kind),
                 v = read(layer + ".self_attn.v_proj" + kind);
    const auto groups = static_cast<size_t>(c.num_query_groups);
    Values fused;
    for (size_t group = 0; group < groups; ++group) {
      for (const Values* of : {&q, &k, &v}) {
        const size_t share = of->size() / groups;
        fused.insert(fused.end(), of->begin() + group * share, of->begin() + (group + 1) * share);
      }
    }
    return fused;
  }
  return read(layer + "." + kNames.at(part) + kind);
}

// Largest difference as a share of the largest magnitude of `theirs`.
double RelativeDifference(const float* ours, const Values& theirs) {
  double largest = 0, difference = 0;
  for (size_t i = 0; i < theirs.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(theirs[i]));
    difference = std::max<double>(difference, std::fabs(ours[i] - theirs[i]));
  }
  EXPECT_GT(largest, 0);
  return difference / largest;
}

class HuggingFaceFixtures : public testing::TestWithParam<std::string> {};

TEST_P(HuggingFaceFixtures, LogitsLossAndGradients) {
  std::ifstream config_file(Path(GetParam(), "config.json"));
  const auto weights = SafetensorsFile::Open(Path(GetParam(), "model.safetensors")),
             reference = SafetensorsFile::Open(Path(GetParam(), "reference.safetensors"));
  ASSERT_TRUE(weights.ok()) << weights.status();
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto ids = ReadAs<int64_t>(*reference, "input_ids");
  const int64_t rows = reference->Find("input_ids")->shape[0], length = reference->Find("input_ids")->shape[1];
  const GptConfig config = ConfigOf(json::parse(config_file), length);

  GptModel model(config, nullptr);
  ParameterStore store(config.dtype, DeviceType::kCpu);
  model.DeclareParameters(&store);
  store.Allocate();
  size_t elements = 0;
  for (const Parameter& parameter : store.parameters()) {
    const Values values =
        FromHuggingFace(config, parameter.spec.name, [&](const std::string& name) { return ReadAs<float>(*weights, name); });
    ASSERT_EQ(static_cast<int64_t>(values.size()), parameter.value.size()) << parameter.spec.name;
    std::copy(values.begin(), values.end(), parameter.value.as<float>());
    elements += values.size();
  }
  size_t theirs = 0;
  for (const SafetensorsEntry& entry : weights->entries()) theirs += static_cast<size_t>(entry.NumElements());
  EXPECT_EQ(elements, theirs) << "every weight of theirs has a place";
  model.Prepare(store, static_cast<int>(rows));

  std::vector<int32_t> tokens(ids.begin(), ids.end()), labels(ids.size(), 0), positions(ids.size());
  Values mask(ids.size(), 1.0f);
  for (int64_t i = 0; i < rows * length; ++i) {
    const bool last = i % length == length - 1;
    positions[i] = static_cast<int32_t>(i % length);
    labels[i] = last ? 0 : tokens[i + 1];
    if (last) mask[i] = 0.0f;
  }

  Values sequence_first(rows * length * config.padded_vocab_size), logits;
  model.Logits(tokens.data(), positions.data(),
               {sequence_first.data(), DType::kF32, DeviceType::kCpu, {length, rows, config.padded_vocab_size}});
  for (int64_t i = 0; i < rows * length; ++i) {
    const auto from = sequence_first.begin() + (i % length * rows + i / length) * config.padded_vocab_size;
    logits.insert(logits.end(), from, from + config.padded_vocab_size);
  }
  const double logits_difference = RelativeDifference(logits.data(), ReadAs<float>(*reference, "logits"));
  EXPECT_LE(logits_difference, 1e-4);

  RngStreams streams(1);
  const GptModel::LossSum sum =
      model.ForwardBackward(tokens.data(), labels.data(), mask.data(), positions.data(), 1.0f, &streams);
  const double loss_difference = std::fabs(sum.loss_sum / sum.tokens - ReadAs<float>(*reference, "loss").at(0));
  EXPECT_LE(loss_difference, 1e-5);

  double worst = 0;
  for (const Parameter& parameter : store.parameters()) {
    const Values expected = FromHuggingFace(config, parameter.spec.name,
                                            [&](const std::string& name) { return ReadAs<float>(*reference, "grad." + name); });
    const double difference = RelativeDifference(parameter.main_grad.as<float>(), expected);
    EXPECT_LE(difference, 1e-4) << parameter.spec.name;
    worst = std::max(worst, difference);
  }
  fmt::print("{}: loss {:.1e}, logits {:.1e}, worst gradient {:.1e}\n", GetParam(), loss_difference, logits_difference, worst);
}

INSTANTIATE_TEST_SUITE_P(Llama, HuggingFaceFixtures,
                         testing::Values("llama_untied", "llama_tied_rope3", "llama_bias", "mistral", "qwen2", "qwen3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace mbridge
