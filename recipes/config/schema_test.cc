#include "recipes/config/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mbridge/v1/config.pb.h"
#include "mbridge/v1/options.pb.h"
#include "recipes/config/assignment.h"

namespace mbridge::recipes {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

TEST(Values, Grammar) {
  EXPECT_EQ(ParseValue("1_000")->integer, 1000);
  EXPECT_EQ(ParseValue("+5")->integer, 5);
  EXPECT_EQ(ParseValue("-7")->integer, -7);
  EXPECT_DOUBLE_EQ(ParseValue("3e-4")->number, 3e-4);
  EXPECT_DOUBLE_EQ(ParseValue(".5")->number, 0.5);
  EXPECT_DOUBLE_EQ(ParseValue("1_0.5")->number, 10.5);
  EXPECT_EQ(ParseValue("1__0")->kind, Value::Kind::kString);
  EXPECT_EQ(ParseValue("0x10")->kind, Value::Kind::kString);
  EXPECT_EQ(ParseValue("infinity")->kind, Value::Kind::kString);
  EXPECT_EQ(ParseValue("True")->kind, Value::Kind::kBool);
  EXPECT_TRUE(ParseValue("null")->is_null());
  EXPECT_EQ(ParseValue("none")->kind, Value::Kind::kString);
  EXPECT_EQ(ParseValue("'null'")->text, "null");
  EXPECT_EQ(ParseValue("'it\\'s'")->text, "it's");
  EXPECT_EQ(ParseValue("\"a,b\"")->text, "a,b");
  EXPECT_EQ(ParseValue("a,b")->text, "a,b");
  EXPECT_EQ(ParseValue("[1, x, [2.5]]")->list.size(), 3u);
  EXPECT_EQ(ParseValue("{A:1,B:'x y'}")->map[1].value.text, "x y");
  EXPECT_TRUE(ParseValue("[]")->list.empty());
  for (const char* wrong : {"", " 1", "1 ", "[1", "{a}", "'x", "[1]]", "[,]", "[1,,2]"})
    EXPECT_FALSE(ParseValue(wrong).ok()) << wrong;
  EXPECT_FALSE(ParseValue(std::string(100, '[')).ok());
}

TEST(Values, FormatReadsBack) {
  for (const char* text : {"null", "true", "17", "0.1", "1e-08", "word", "'9999,8,2'", "'1'", "[1,a,[b]]", "'it\\'s'", "''",
                           "'a b '", "inf", "'c:\\\\d'"}) {
    auto value = ParseValue(text);
    ASSERT_TRUE(value.ok()) << text;
    auto again = ParseValue(FormatValue(*value));
    ASSERT_TRUE(again.ok()) << text;
    EXPECT_TRUE(*value == *again) << text << " became " << FormatValue(*value);
  }
}

TEST(SchemaTest, EveryKeyIsDescribed) {
  EXPECT_GT(Schema::Get().keys().size(), 800u);
  for (const Key& key : Schema::Get().keys()) {
    EXPECT_FALSE(key.info->help().empty()) << key.path;
    EXPECT_EQ(key.info->effect() == v1::EFFECT_NONE, !key.info->instead().empty()) << key.path << " must say what to use instead";
    // The default is of the key's type and in its range.
    v1::ConfigContainer config;
    if (!key.info->default_value().empty()) {
      auto wrong = WriteKey(key, key.Default(), &config);
      EXPECT_FALSE(wrong) << key.path << " " << wrong.value_or("");
      EXPECT_FALSE(ReadKey(config, key).is_null()) << key.path;
    }
    if (!key.info->only().empty()) {
      EXPECT_FALSE(WriteKey(key, ParseWord(key.info->only()), &config)) << key.path;
    }
  }
}

TEST(SchemaTest, SuggestsNearNames) {
  EXPECT_THAT(Schema::Get().Nearest("train.train_iter"), Contains("train.train_iters"));
  EXPECT_THAT(Schema::Get().Nearest("model.hiden_size"), Contains("model.hidden_size"));
  EXPECT_THAT(Schema::Get().Nearest("lr"), Contains("optimizer.lr"));
  EXPECT_TRUE(Schema::Get().Nearest("completely.unrelated_nonsense_word").empty());
}

TEST(SchemaTest, RefusedWriteChangesNothing) {
  v1::ConfigContainer config;
  config.mutable_dataset()->add_data_path("kept");
  const Key& key = *Schema::Get().Find("dataset.blend");
  config.mutable_dataset()->mutable_blend()->add_prefixes("a");
  EXPECT_TRUE(WriteKey(key, *ParseValue("[[x],[-1]]"), &config));
  EXPECT_EQ(config.dataset().blend().prefixes(0), "a");
  EXPECT_EQ(config.dataset().data_path(0), "kept");
}

TEST(SchemaTest, CanonicalWords) {
  v1::ConfigContainer config;
  EXPECT_FALSE(WriteKey(*Schema::Get().Find("model.params_dtype"), Value::String("torch.bfloat16"), &config));
  EXPECT_EQ(config.model().params_dtype(), "bf16");
  EXPECT_FALSE(WriteKey(*Schema::Get().Find("model.activation_func"), Value::String("relu2"), &config));
  EXPECT_EQ(config.model().activation_func(), "squared_relu");
}

TEST(SchemaTest, DescribeKeysFilters) {
  auto keys = DescribeKeys("LR_WARMUP");
  ASSERT_EQ(keys.size(), 4u);
  EXPECT_EQ(keys[0].key, "scheduler.lr_warmup_fraction");
  EXPECT_EQ(keys[0].range, "0 .. 1");
  EXPECT_EQ(keys[1].mlm_flag, "--lr-warmup-iters");
  EXPECT_THAT(DescribeKeys("train.manual_gc_interval")[0].effect, HasSubstr("no effect"));
}

TEST(Overrides, PlusIsAsStrict) {
  EXPECT_EQ(ParseOverride("++a.b=1")->key, "a.b");
  EXPECT_EQ(ParseOverride("+a.b=1")->key, "a.b");
  EXPECT_EQ(ParseOverride("a.b=x=y")->value.text, "x=y");
}

}  // namespace
}  // namespace mbridge::recipes
