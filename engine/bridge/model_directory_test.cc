// What real directories of models look like.
#include "engine/bridge/model_directory.h"

#include <algorithm>
#include <cstring>

#include "engine/bridge/conversion_test_support.h"

namespace mbridge {
namespace {

class RealDirectories : public ConversionTest {
 protected:
  ConversionPlan Plan(const std::string& source) {
    const auto plan = PlanImport(Import(source));
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *plan : ConversionPlan();
  }
  // The fixture in two files with an index.
  std::string Sharded(const std::string& fixture) {
    const std::string source = Copy(fixture);
    auto all = ReadAll(source + "/model.safetensors");
    std::filesystem::remove(source + "/model.safetensors");
    Json map = Json::object();
    std::vector<Stored> halves[2];
    for (size_t i = 0; i < all.size(); ++i) {
      const int half = i < all.size() / 2 ? 0 : 1;
      map[all[i].tensor.name] = fmt::format("model-0000{}-of-00002.safetensors", half + 1);
      halves[half].push_back(all[i]);
    }
    for (const int half : {0, 1}) WriteAll(fmt::format("{}/model-0000{}-of-00002.safetensors", source, half + 1), halves[half]);
    Write(source + "/" + kIndexName, Json({{"metadata", Json::object()}, {"weight_map", map}}).dump());
    return source;
  }
};

TEST_F(RealDirectories, PickledWeightsAreRefusedWithTheWayOut) {
  const std::string source = Copy("llama_untied");
  std::filesystem::rename(source + "/model.safetensors", source + "/pytorch_model.bin");
  const std::string message = Refusal(source);
  EXPECT_NE(message.find("pickle"), std::string::npos) << message;
  EXPECT_NE(message.find("save_pretrained"), std::string::npos) << message;
}

TEST_F(RealDirectories, MissingShardsAreNamed) {
  const std::string source = Sharded("llama_untied");
  EXPECT_TRUE(PlanImport(Import(source)).ok());
  std::filesystem::remove(source + "/model-00002-of-00002.safetensors");
  const std::string message = Refusal(source);
  EXPECT_NE(message.find("model-00002-of-00002.safetensors"), std::string::npos) << message;
  EXPECT_NE(message.find("model.layers.1.input_layernorm.weight"), std::string::npos) << message;
  std::filesystem::remove(source + "/model-00001-of-00002.safetensors");
  EXPECT_NE(Refusal(source).find("model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"), std::string::npos);
}

TEST_F(RealDirectories, StaleIndexIsOnlyNoted) {
  const std::string source = Copy("llama_untied");
  Json map = Json::object();
  for (const Stored& stored : ReadAll(source + "/model.safetensors"))
    map[stored.tensor.name] = "model-00001-of-00001.safetensors";
  Write(source + "/" + kIndexName, Json({{"weight_map", map}}).dump());
  const ConversionPlan plan = Plan(source);
  ASSERT_FALSE(plan.notes.empty());
  EXPECT_NE(plan.notes[0].find("stale"), std::string::npos) << plan.notes[0];
}

TEST_F(RealDirectories, TypeTagThatDiffersIsNoted) {
  const std::string source = Copy("llama_untied");
  SetKey(source, "dtype", "bfloat16");
  const ConversionPlan plan = Plan(source);
  ASSERT_FALSE(plan.notes.empty());
  EXPECT_NE(plan.notes[0].find("bfloat16"), std::string::npos) << plan.notes[0];
  EXPECT_EQ(plan.result[0].dtype, "F32");
}

TEST_F(RealDirectories, UnusedTensorsAreListedAndSkipped) {
  const std::string source = Copy("llama_untied");
  auto all = ReadAll(source + "/model.safetensors");
  all.push_back({{"model.layers.1.self_attn.rotary_emb.inv_freq", "F32", {8}, 32}, std::string(32, '\1')});
  all.push_back({{"vision.patch", "F32", {2}, 8}, std::string(8, '\1')});
  WriteAll(source + "/model.safetensors", all);
  const ConversionPlan plan = Plan(source);
  ASSERT_EQ(plan.skipped.size(), 2u);
  EXPECT_NE(plan.skipped[0].find("inv_freq"), std::string::npos);
  EXPECT_NE(plan.skipped[1].find("vision.patch"), std::string::npos);
}

TEST_F(RealDirectories, MissingAndDeniedTensorsAreErrorsWithNames) {
  const std::string source = Copy("llama_bias");
  auto all = ReadAll(source + "/model.safetensors");
  const auto is = [](const char* name) { return [=](const Stored& stored) { return stored.tensor.name == name; }; };
  all.erase(std::find_if(all.begin(), all.end(), is("model.layers.1.mlp.up_proj.bias")));
  all.erase(std::find_if(all.begin(), all.end(), is("model.norm.weight")));
  WriteAll(source + "/model.safetensors", all);
  std::string message = Refusal(source);
  EXPECT_NE(message.find("model.layers.1.mlp.up_proj.bias"), std::string::npos) << message;
  EXPECT_NE(message.find("model.norm.weight"), std::string::npos) << message;

  const std::string other = Copy("llama_bias", "other");
  SetKey(other, "attention_bias", false);
  SetKey(other, "mlp_bias", false);
  message = Refusal(other);
  EXPECT_NE(message.find("model.layers.0.self_attn.q_proj.bias"), std::string::npos) << message;

  const std::string third = Copy("llama_untied", "third");
  SetKey(third, "num_key_value_heads", 1);
  message = Refusal(third);
  EXPECT_NE(message.find("model.layers.0.self_attn.k_proj.weight [32, 64] instead of [16, 64]"), std::string::npos) << message;
}

TEST_F(RealDirectories, TiedHeadThatIsStoredIsFoundByItsBytes) {
  const std::string source = Copy("llama_tied_rope3");
  auto all = ReadAll(source + "/model.safetensors");
  const auto words =
      std::find_if(all.begin(), all.end(), [](const Stored& s) { return s.tensor.name == "model.embed_tokens.weight"; });
  Stored head = *words;
  head.tensor.name = "lm_head.weight";
  all.insert(all.begin(), head);
  WriteAll(source + "/model.safetensors", all);
  EXPECT_TRUE(Plan(source).skipped.empty());
  ASSERT_TRUE(RunImport(Import(source), {}).ok());
  const auto exported = RunExport(Export(), {});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(Read(source + "/model.safetensors"), Read(exported->path + "/model.safetensors")) << "the whole file comes back";

  all[0].bytes[0] ^= 1;
  WriteAll(source + "/model.safetensors", all);
  EXPECT_NE(Refusal(source).find("lm_head.weight"), std::string::npos);
}

TEST_F(RealDirectories, UnknownModelsAndOptionsAreNamed) {
  const std::string source = Copy("llama_untied");
  SetKey(source, "model_type", "blorp");
  EXPECT_NE(Refusal(source).find("\"blorp\""), std::string::npos);
  SetKey(source, "model_type", "llama");
  SetKey(source, "hidden_act", "relu");
  SetKey(source, "flux_capacitor", true);
  const std::string message = Refusal(source);
  EXPECT_NE(message.find("hidden_act"), std::string::npos) << message;
  EXPECT_NE(message.find("flux_capacitor"), std::string::npos) << message;
  Write(source + "/config.json", "{broken");
  EXPECT_NE(Refusal(source).find("not JSON"), std::string::npos);
  std::filesystem::remove(source + "/config.json");
  EXPECT_NE(Refusal(source).find("no config.json"), std::string::npos);
  Write(source + "/adapter_config.json", "{}");
  EXPECT_NE(Refusal(source).find("adapter"), std::string::npos);
}

TEST_F(RealDirectories, HubCacheWithLinksInsideTheRoots) {
  const std::string blobs = Path("hub/models--org--tiny/blobs"), snapshot = Path("hub/models--org--tiny/snapshots/abc");
  std::filesystem::create_directories(blobs);
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directories(Path("hub/models--org--tiny/refs"));
  Write(Path("hub/models--org--tiny/refs/main"), "abc");
  const std::string source = Copy("llama_untied");
  for (const char* file : {"config.json", "model.safetensors"}) {
    std::filesystem::rename(source + "/" + file, blobs + "/" + file);
    std::filesystem::create_symlink(fmt::format("../../blobs/{}", file), snapshot + "/" + file);
  }
  setenv("HF_HUB_CACHE", Path("hub").c_str(), 1);
  ImportOptions options = Import("org/tiny");
  options.roots = {Path("hub")};
  EXPECT_TRUE(PlanImport(options).ok());
  EXPECT_NE(Refusal("org/tiny", {Path("elsewhere")}).find("beneath none"), std::string::npos);
  // A link out of the roots.
  std::filesystem::rename(blobs + "/model.safetensors", Path("outside"));
  std::filesystem::remove(snapshot + "/model.safetensors");
  std::filesystem::create_symlink(Path("outside"), snapshot + "/model.safetensors");
  EXPECT_NE(Refusal("org/tiny", {Path("hub")}).find("outside"), std::string::npos);
  const std::string absent = Refusal("org/absent");
  EXPECT_NE(absent.find("hf download org/absent"), std::string::npos) << absent;
  unsetenv("HF_HUB_CACHE");
}

}  // namespace
}  // namespace mbridge
