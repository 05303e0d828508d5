#include "engine/bridge/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

namespace mbridge {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class SafetensorsTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  absl::StatusOr<SafetensorsFile> OpenBytes(const std::string& content) {
    std::ofstream(path_, std::ios::binary) << content;
    return SafetensorsFile::Open(path_);
  }
  absl::StatusOr<SafetensorsFile> OpenParts(const std::string& header, size_t data_bytes) {
    std::string content(8, '\0');
    for (int i = 0; i < 8; ++i) content[i] = static_cast<char>(header.size() >> (8 * i));
    content += header;
    for (size_t i = 0; i < data_bytes; ++i) content += static_cast<char>(i);
    return OpenBytes(content);
  }
  void ExpectBroken(const std::string& header, size_t data_bytes, const std::string& words) {
    const auto file = OpenParts(header, data_bytes);
    ASSERT_FALSE(file.ok()) << header;
    EXPECT_EQ(file.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(words));
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(path_));
  }

  std::string path_ =
      testing::TempDir() + "/safetensors_test_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
};

TEST_F(SafetensorsTest, ReadsTensorsInTheOrderOfTheirBytes) {
  const auto file = OpenParts(R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},"__metadata__":{"format":"pt"},)"
                              R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},)"
                              R"("empty":{"dtype":"I64","shape":[3,0],"data_offsets":[10,10]}}   )",
                              10);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->entries().size(), 3u);
  EXPECT_EQ(file->entries()[0].name, "a");
  EXPECT_EQ(file->entries()[0].NumElements(), 1);
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->Find("c"), nullptr);
  const SafetensorsEntry* b = file->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, "F32");
  EXPECT_THAT(b->shape, ElementsAre(2, 1));
  unsigned char bytes[8];
  ASSERT_EQ(b->bytes, 8);
  ASSERT_TRUE(file->Read(*b, bytes).ok());
  EXPECT_THAT(bytes, ElementsAre(2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(file->Find("empty")->NumElements(), 0);
}

TEST_F(SafetensorsTest, AFileWithoutTensors) {
  const auto file = OpenParts("{}", 0);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->entries().empty());
}

TEST_F(SafetensorsTest, RefusesBrokenHeaders) {
  const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  ExpectBroken("", 0, "does not begin with {");
  ExpectBroken(" {}", 0, "does not begin with {");
  ExpectBroken("{" + a, 4, "not a JSON object");
  ExpectBroken("{} {}", 0, "not a JSON object");
  ExpectBroken("{" + a + "," + a + "}", 4, "\"a\" twice");
  ExpectBroken(R"({"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}})", 4, "\"dtype\" twice");
  ExpectBroken(R"({"a":7})", 0, "not described by an object");
  ExpectBroken(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "no dtype");
  ExpectBroken(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4, "unknown dtype F31");
  ExpectBroken(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "no shape");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "not made of sizes");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "not made of sizes");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4, "more than 2^63");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "no pair of data_offsets");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,-4]}})", 4, "not sizes");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "[0, 8] in 4 bytes");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "[4, 0] in 4 bytes");
  ExpectBroken(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "has 4 bytes of data, its shape and dtype make 8");
  ExpectBroken(R"({"__metadata__":[]})", 0, "not an object");
  ExpectBroken(R"({"__metadata__":{"a":1}})", 0, "no text for \"a\"");
}

TEST_F(SafetensorsTest, RefusesHolesAndOverlaps) {
  const std::string a = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  ExpectBroken("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})", 9, "\"b\" begins at");
  ExpectBroken("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})", 7, "\"b\" begins at");
  ExpectBroken(R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5, "\"b\" begins at");
  ExpectBroken("{" + a + "}", 5, "its tensors end at byte");
}

TEST_F(SafetensorsTest, RefusesBadLengths) {
  EXPECT_EQ(OpenBytes("short").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(OpenBytes(std::string("\x10\0\0\0\0\0\0\0{}", 10)).status().message()), HasSubstr("in a file of 10"));
  EXPECT_THAT(std::string(OpenBytes(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)).status().message()),
              HasSubstr("at most 100000000"));
  EXPECT_EQ(SafetensorsFile::Open(path_ + ".missing").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace mbridge
