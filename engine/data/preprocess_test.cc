#include "engine/data/preprocess.h"

#include <filesystem>

#include <gmock/gmock.h>

#include "engine/data/inspect.h"
#include "engine/data/test_support.h"

namespace mbridge {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_data::TemporaryFolder;
using testing_data::WriteAll;

std::string TextOf(const std::string& prefix, int64_t sequence) {
  auto data = IndexedDataset::Open(prefix);
  EXPECT_TRUE(data.ok()) << data.status();
  std::vector<int32_t> ids(static_cast<size_t>((*data)->length(sequence)));
  (*data)->Read(sequence, 0, (*data)->length(sequence), ids.data());
  EXPECT_EQ(ids.back(), 256);
  return *ByteTokenizer().Decode(ids);
}

TEST(TokenizerTest, Bytes) {
  std::vector<int32_t> ids = {7};
  ByteTokenizer tokenizer;
  ASSERT_TRUE(tokenizer.Encode("a\xff\x01", &ids).ok());
  EXPECT_THAT(ids, ElementsAre(7, 97, 255, 1));
  EXPECT_EQ(*tokenizer.Decode(std::vector<int32_t>{97, 256, 255}), "a\xff");
  EXPECT_TRUE(absl::IsOutOfRange(tokenizer.Decode(std::vector<int32_t>{257}).status()));
}

TEST(TokenizerTest, Null) {
  auto tokenizer = MakeTokenizer("NullTokenizer", 100);
  ASSERT_TRUE(tokenizer.ok());
  std::vector<int32_t> ids;
  ASSERT_TRUE((*tokenizer)->Encode(" 1\t22 99\n", &ids).ok());
  EXPECT_THAT(ids, ElementsAre(1, 22, 99));
  EXPECT_EQ((*tokenizer)->eod_id(), 99);
  EXPECT_EQ(*(*tokenizer)->Decode(ids), "1 22");
  EXPECT_TRUE(absl::IsOutOfRange((*tokenizer)->Encode("100", &ids)));
  EXPECT_FALSE((*tokenizer)->Encode("1x", &ids).ok());
  EXPECT_FALSE(MakeTokenizer("NullTokenizer", 1).ok());
  EXPECT_THAT(std::string(MakeTokenizer("GPT2BPETokenizer", 10).status().message()),
              HasSubstr("must be NullTokenizer or ByteLevel"));
}

TEST(PreprocessTest, JsonLines) {
  TemporaryFolder folder;
  WriteAll(folder / "in.jsonl",
           "{\"text\": \"Hello \\u00e9\"}\n\n{\"text\": \"\", \"x\": 1}\r\n{\"x\": [], \"text\": \"b\\nc\"}");
  PreprocessOptions options{.inputs = {folder / "in.jsonl"}, .output_prefix = folder / "deep/out"};
  auto result = PreprocessText(options, ByteTokenizer());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->documents, 2);
  EXPECT_EQ(result->empty, 1);
  EXPECT_EQ(result->tokens, 8 + 1 + 3 + 1);
  EXPECT_EQ(result->text_bytes, 11);
  EXPECT_EQ(TextOf(options.output_prefix, 0), "Hello \u00e9");
  EXPECT_EQ(TextOf(options.output_prefix, 1), "b\nc");
  auto facts = InspectData(options.output_prefix, true);
  ASSERT_TRUE(facts.ok());
  EXPECT_EQ(facts->type, TokenType::kUint16);
  EXPECT_EQ(facts->documents, 2);
  EXPECT_EQ(facts->max_id, 256);
  EXPECT_EQ(facts->min_id, 10);
  EXPECT_EQ(facts->bin_bytes, facts->expected_bin_bytes);
  EXPECT_THAT(FactLines(*facts), testing::Contains("tokens: 13"));
  EXPECT_THAT(FactLines(*facts), testing::Contains("sequence length: 4 to 9"));
}

TEST(PreprocessTest, BadLinesAreNamedAndNothingIsWritten) {
  TemporaryFolder folder;
  const auto error_of = [&](const std::string& line) {
    WriteAll(folder / "in.jsonl", "{\"text\": \"good\"}\n\n" + line + "\n");
    PreprocessOptions options{.inputs = {folder / "in.jsonl"}, .output_prefix = folder / "out"};
    auto result = PreprocessText(options, ByteTokenizer());
    EXPECT_TRUE(absl::IsInvalidArgument(result.status()));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
    return std::string(result.status().message());
  };
  EXPECT_THAT(error_of("{\"text\": \"open"), HasSubstr("in.jsonl: line 3: not JSON"));
  EXPECT_THAT(error_of("{\"text\": \"\xff\"}"), HasSubstr("line 3: not JSON"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("line 3: expected a JSON object, found array"));
  EXPECT_THAT(error_of("{\"content\": \"a\"}"), HasSubstr("line 3: the object has no key 'text'"));
  EXPECT_THAT(error_of("{\"text\": 5}"), HasSubstr("line 3: key 'text': expected a string, found number"));
}

TEST(PreprocessTest, PlainTextFormats) {
  TemporaryFolder folder;
  WriteAll(folder / "in.txt", "one\ntwo\n\n \nthree");
  const auto documents = [&](TextFormat format) {
    PreprocessOptions options{.inputs = {folder / "in.txt"}, .output_prefix = folder / "out", .format = format};
    options.overwrite = true;
    auto result = PreprocessText(options, ByteTokenizer());
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<std::string> texts;
    for (int64_t i = 0; i < result->documents; ++i) texts.push_back(TextOf(options.output_prefix, i));
    return texts;
  };
  EXPECT_THAT(documents(TextFormat::kAuto), ElementsAre("one\ntwo\n", "three"));
  EXPECT_THAT(documents(TextFormat::kLines), ElementsAre("one", "two", " ", "three"));
  EXPECT_THAT(documents(TextFormat::kWholeFile), ElementsAre("one\ntwo\n\n \nthree"));
}

TEST(PreprocessTest, OtherRefusals) {
  TemporaryFolder folder;
  WriteAll(folder / "empty.txt", "\n\n");
  PreprocessOptions options{.inputs = {folder / "empty.txt"}, .output_prefix = folder / "out"};
  EXPECT_THAT(std::string(PreprocessText(options, ByteTokenizer()).status().message()), HasSubstr("no document with text"));
  options.inputs = {folder / "missing.txt"};
  EXPECT_TRUE(absl::IsNotFound(PreprocessText(options, ByteTokenizer()).status()));
  options.inputs.clear();
  EXPECT_FALSE(PreprocessText(options, ByteTokenizer()).ok());
  WriteAll(folder / "ids.txt", "1 2\n3 300\n");
  options.inputs = {folder / "ids.txt"};
  options.format = TextFormat::kLines;
  EXPECT_THAT(std::string(PreprocessText(options, NullTokenizer(100)).status().message()),
              HasSubstr("ids.txt: line 2: token id 300"));
}

}  // namespace
}  // namespace mbridge
