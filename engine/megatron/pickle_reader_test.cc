#include "engine/megatron/pickle_reader.h"

#include <gmock/gmock.h>

#include "engine/megatron/conversion_test_support.h"
#include "engine/megatron/pickle_writer.h"
#include "engine/megatron/torch_archive.h"
#include "engine/megatron/torch_archive_writer.h"

namespace mbridge {
namespace {

using testing::HasSubstr;

std::string MessageOf(const std::string& pickle) {
  const auto read = ReadPickle(pickle, "file");
  EXPECT_FALSE(read.ok());
  return std::string(read.status().message());
}

TEST(PickleReader, ReadsWhatTheWriterWrites) {
  PickleWriter writer;
  writer.BeginDict().Text("list").BeginList().Int(-7).Int(int64_t{1} << 40).Float(0.5).Bool(true).None().EndList();
  writer.Text("object").NewObject("argparse", "Namespace").BeginDict().Text("a").Int(1).EndDict().SetState();
  writer.Text("call").Global("torch", "Size").BeginTuple().BeginTuple().Int(2).EndTuple().EndTuple().Call().EndDict();
  const auto pickle = ReadPickle(writer.Finish(), "file");
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  const PickleValue& root = *pickle->root;
  const PickleValue* list = root.Find("list");
  ASSERT_TRUE(list != nullptr && list->items.size() == 5);
  EXPECT_EQ(list->items[0]->integer, -7);
  EXPECT_EQ(list->items[1]->integer, int64_t{1} << 40);
  EXPECT_EQ(list->items[2]->real, 0.5);
  EXPECT_TRUE(root.Find("object")->IsMadeBy("argparse Namespace"));
  EXPECT_EQ(root.Find("object")->state->Find("a")->integer, 1);
  EXPECT_TRUE(root.Find("call")->IsMadeBy("torch Size"));
  EXPECT_EQ(root.Find("nothing"), nullptr);
}

TEST(PickleReader, RefusesCodeByName) {
  // os.system("id"), as pickles attack: GLOBAL, by stack, through builtins.
  EXPECT_THAT(MessageOf("\x80\x02"
                        "cos\nsystem\n(X\x02" +
                        std::string("\0\0\0", 3) + "idtR."),
              HasSubstr("os.system"));
  EXPECT_THAT(MessageOf("\x80\x04\x8c\x05posix\x8c\x06system\x93."), HasSubstr("posix.system"));
  EXPECT_THAT(MessageOf("\x80\x02"
                        "cbuiltins\neval\n."),
              HasSubstr("builtins.eval"));
  EXPECT_THAT(MessageOf("\x80\x02"
                        "ctorch\nload\n."),
              HasSubstr("torch.load"));
  EXPECT_THAT(MessageOf("\x80\x02"
                        "cfile\nStorage\n."),
              HasSubstr("file.Storage"));
  // INST and other operations of old protocols.
  EXPECT_THAT(MessageOf("\x80\x02(S'id'\nios\nsystem\n."), HasSubstr("the pickle operation 0x53"));
  // Calling what is not named.
  EXPECT_THAT(MessageOf("\x80\x02K\x01)R."), HasSubstr("not a class or function"));
}

TEST(PickleReader, DamageAndLimits) {
  EXPECT_THAT(MessageOf(""), HasSubstr("ends early"));
  EXPECT_THAT(MessageOf("\x80\x02"), HasSubstr("ends early"));
  EXPECT_THAT(MessageOf("\x80\x09N."), HasSubstr("protocol 9"));
  EXPECT_THAT(MessageOf("\x80\x02NN."), HasSubstr("left"));
  EXPECT_THAT(MessageOf("\x80\x02h\x05."), HasSubstr("refers"));
  EXPECT_THAT(MessageOf("\x80\x02Nq\x05."), HasSubstr("gap"));
  EXPECT_THAT(MessageOf("\x80\x02X\xff\xff\xff\xff"
                        "a."),
              HasSubstr("ends early"));
  EXPECT_THAT(MessageOf("\x80\x02t."), HasSubstr("mark"));
  EXPECT_THAT(MessageOf("\x80\x02(0."), HasSubstr("missing"));
  EXPECT_THAT(MessageOf("\x80\x02" + std::string(2000, '(')), HasSubstr("nested"));
  const auto many = ReadPickle("\x80\x02" + std::string(200, ']') + ".", "file", {.values = 100, .depth = 10});
  EXPECT_THAT(std::string(many.status().message()), HasSubstr("too many values"));
  // A list that holds itself is a value like any other.
  EXPECT_TRUE(ReadPickle(std::string("\x80\x02]q\0h\0a.", 9), "file").ok());
}

class TorchArchiveTest : public MegatronTest {
 protected:
  absl::Status Open(const std::string& bytes) {
    Write(Path("archive"), bytes);
    const auto file = FileReader::Open(Path("archive"));
    EXPECT_TRUE(file.ok());
    return TorchArchive::Open(*file).status();
  }
  static std::string Replaced(std::string text, const std::string& from, const std::string& to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
      text.replace(at, from.size(), to);
    return text;
  }
};

TEST_F(TorchArchiveTest, TensorsThereAndBack) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const TensorFrame frame = FrameOfTensor(DType::kF32, {2, 3}, 0);
  const std::string data(reinterpret_cast<const char*>(values.data()), 24);
  Write(Path("archive"), "before" + frame.before + data + frame.after);
  EXPECT_EQ(frame.before.size() % 64, 0u);
  const auto file = FileReader::Open(Path("archive"));
  ASSERT_TRUE(file.ok());
  const auto archive = TorchArchive::Open(*file, 6, file->size() - 6);
  ASSERT_TRUE(archive.ok()) << archive.status();
  const auto tensor = archive->TensorOf(archive->root());
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor->strides, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(tensor->type, "Float");
  EXPECT_EQ(tensor->offset, static_cast<int64_t>(6 + frame.before.size()));
}

TEST_F(TorchArchiveTest, RefusesArchives) {
  const std::string good = ArchiveOfObject(PickleWriter().None().Finish());
  EXPECT_TRUE(Open(good).ok());
  EXPECT_THAT(std::string(Open(Replaced(good, "archive/version", "../hive/version")).message()), HasSubstr("../hive/version"));
  EXPECT_THAT(std::string(Open(Replaced(good, "archive/version", "/rchive/version")).message()), HasSubstr("/rchive/version"));
  EXPECT_THAT(std::string(Open(Replaced(good, "archive/data.pkl", "archive/data.pk1")).message()), HasSubstr("no data.pkl"));
  EXPECT_THAT(std::string(Open(Replaced(good, "little", "bigbig")).message()), HasSubstr("endian"));
  EXPECT_THAT(std::string(Open(good.substr(0, good.size() - 1)).message()), HasSubstr("end record"));
  EXPECT_THAT(std::string(Open("").message()), HasSubstr("too short"));
  EXPECT_THAT(std::string(Open("\x80\x02\x8a\n" + good).message()), HasSubstr("before 1.6"));
  std::string packed = good;
  packed[packed.find("PK\x01\x02") + 10] = 8;
  EXPECT_THAT(std::string(Open(packed).message()), HasSubstr("is compressed"));
  EXPECT_THAT(std::string(Open(ArchiveOfObject("\x80\x02"
                                               "cos\nsystem\n."))
                              .message()),
              HasSubstr("os.system"));
}

TEST_F(TorchArchiveTest, TensorsStayWithinTheirStorage) {
  const TensorFrame frame = FrameOfTensor(DType::kF32, {2, 3}, 0);
  const auto message = [&](const std::string& bytes) {
    Write(Path("archive"), bytes);
    const auto file = FileReader::Open(Path("archive"));
    const auto archive = TorchArchive::Open(*file);
    EXPECT_TRUE(archive.ok()) << archive.status();
    return archive.ok() ? std::string(archive->TensorOf(archive->root()).status().message()) : "";
  };
  const std::string whole = frame.before + std::string(24, '\0') + frame.after;
  EXPECT_EQ(message(whole), "");
  const std::string two("J\x02\0\0\0", 5), three("J\x03\0\0\0", 5), four("J\x04\0\0\0", 5);
  EXPECT_THAT(message(Replaced(whole, "(" + two + three, "(" + two + four)), HasSubstr("larger than its storage"));
  EXPECT_THAT(message(Replaced(whole, "(" + two + three, "(" + std::string("J\xff\xff\xff\x7f", 5) + three)),
              HasSubstr("larger than its storage"));
}

}  // namespace
}  // namespace mbridge
