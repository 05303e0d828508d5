#include "engine/megatron/torch_archive_writer.h"

#include <zlib.h>

#include <string_view>

#include <fmt/format.h>

#include "engine/core/error.h"
#include "engine/megatron/pickle_writer.h"

namespace mbridge {
namespace {

struct TorchName {
  DType dtype;
  const char *storage, *name;
};
constexpr TorchName kNames[] = {{DType::kF32, "FloatStorage", "float32"}, {DType::kBF16, "BFloat16Storage", "bfloat16"},
                                {DType::kF16, "HalfStorage", "float16"},  {DType::kF64, "DoubleStorage", "float64"},
                                {DType::kI32, "IntStorage", "int32"},     {DType::kI64, "LongStorage", "int64"},
                                {DType::kU8, "ByteStorage", "uint8"}};

const TorchName& NamesOf(DType dtype) {
  for (const TorchName& name : kNames) {
    if (name.dtype == dtype) return name;
  }
  ThrowEngineError("torch has no type {}", NameOf(dtype));
}

void Append(std::string* bytes, uint64_t value, int width) {
  for (int i = 0; i < width; ++i) bytes->push_back(static_cast<char>(value >> (8 * i)));
}

// Builds an archive whose entries follow each other; the bytes of at most one of them are left out.
class ArchiveBuilder {
 public:
  void Add(std::string_view name, std::string_view content) {
    Header(name, content.size(), static_cast<uint32_t>(crc32(0, reinterpret_cast<const Bytef*>(content.data()), content.size())));
    bytes_ += content;
  }
  // The bytes of this entry follow what was built so far.
  std::string AddLeftOut(std::string_view name, int64_t bytes, uint32_t crc) {
    Header(name, static_cast<uint64_t>(bytes), crc);
    left_out_ = bytes;
    std::string before = std::move(bytes_);
    before_ = static_cast<int64_t>(before.size());
    bytes_.clear();
    return before;
  }
  std::string Finish() {
    const uint64_t begin = Position();
    const size_t directory_begin = bytes_.size();
    bytes_ += directory_;
    Append(&bytes_, 0x06054b50, 4);
    Append(&bytes_, 0, 4);  // Disks.
    Append(&bytes_, count_, 2);
    Append(&bytes_, count_, 2);
    Append(&bytes_, bytes_.size() - directory_begin - 12, 4);
    Append(&bytes_, begin, 4);
    Append(&bytes_, 0, 2);
    return std::move(bytes_);
  }

 private:
  uint64_t Position() const { return static_cast<uint64_t>(before_ + left_out_) + bytes_.size(); }

  // Data begin at a multiple of 64 bytes, by an extra field "FB", as torch.save has it.
  void Header(std::string_view entry, uint64_t size, uint32_t crc) {
    constexpr uint64_t kAlignment = 64, kLocalBytes = 30, kExtraHead = 4;
    const std::string name = fmt::format("archive/{}", entry);
    const uint64_t begin = Position();
    const uint64_t unpadded = begin + kLocalBytes + name.size() + kExtraHead;
    const uint64_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;
    std::string common;              // Of the local header and of the directory.
    Append(&common, 0, 2);           // Version needed.
    Append(&common, 1 << 11, 2);     // Names are UTF-8.
    Append(&common, 0, 2);           // Not compressed.
    Append(&common, 0x21 << 16, 4);  // 1 January 1980.
    Append(&common, crc, 4);
    Append(&common, size, 4);
    Append(&common, size, 4);
    Append(&common, name.size(), 2);
    Append(&bytes_, 0x04034b50, 4);
    bytes_ += common;
    Append(&bytes_, kExtraHead + padding, 2);
    bytes_ += name;
    bytes_ += "FB";
    Append(&bytes_, padding, 2);
    bytes_.append(padding, 'Z');
    Append(&directory_, 0x02014b50, 4);
    Append(&directory_, 0, 2);
    directory_ += common;
    directory_.append(12, '\0');  // Extra, comment, disk, attributes.
    Append(&directory_, begin, 4);
    directory_ += name;
    ++count_;
  }

  std::string bytes_, directory_;
  uint64_t count_ = 0;
  int64_t left_out_ = 0, before_ = 0;
};

std::string PickleOfTensor(DType dtype, const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  const int64_t elements = shape.empty() ? 1 : strides[0] * shape[0];
  PickleWriter pickle;
  pickle.Global("torch._utils", "_rebuild_tensor_v2").BeginTuple();
  pickle.BeginTuple()
      .Text("storage")
      .Global("torch", NamesOf(dtype).storage)
      .Text("0")
      .Text("cpu")
      .Int(elements)
      .EndTuple()
      .Persistent();
  pickle.Int(0);
  for (const auto& sizes : {shape, strides}) {
    pickle.BeginTuple();
    for (const int64_t size : sizes) pickle.Int(size);
    pickle.EndTuple();
  }
  pickle.Bool(false).Global("collections", "OrderedDict").BeginTuple().EndTuple().Call();
  pickle.EndTuple().Call();
  return pickle.Finish();
}

constexpr const char* kVersion = "3\n";

}  // namespace

TensorFrame FrameOfTensor(DType dtype, const std::vector<int64_t>& shape, uint32_t crc32) {
  auto bytes = static_cast<int64_t>(SizeOf(dtype));
  for (const int64_t size : shape) bytes *= size;
  ArchiveBuilder archive;
  archive.Add("data.pkl", PickleOfTensor(dtype, shape));
  archive.Add("byteorder", "little");
  TensorFrame frame;
  frame.before = archive.AddLeftOut("data/0", bytes, crc32);
  archive.Add("version", kVersion);
  frame.after = archive.Finish();
  return frame;
}

std::string ArchiveOfObject(const std::string& pickle) {
  ArchiveBuilder archive;
  archive.Add("data.pkl", pickle);
  archive.Add("byteorder", "little");
  archive.Add("version", kVersion);
  return archive.Finish();
}

const char* TorchDtypeName(DType dtype) { return NamesOf(dtype).name; }

}  // namespace mbridge
