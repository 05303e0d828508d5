#include "engine/megatron/zip_reader.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr uint32_t kLocalMark = 0x04034b50, kCentralMark = 0x02014b50, kEndMark = 0x06054b50, kEnd64Mark = 0x06064b50,
                   kLocatorMark = 0x07064b50;
constexpr int64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocatorBytes = 20;
constexpr int64_t kMaxDirectoryBytes = int64_t{256} << 20;
constexpr uint32_t kIn64 = 0xffffffff;  // The number is in the Zip64 field.

uint64_t Number(std::string_view bytes, size_t at, int width) {
  uint64_t number = 0;
  std::memcpy(&number, bytes.data() + at, static_cast<size_t>(width));
  return number;
}
uint32_t U16(std::string_view bytes, size_t at) { return static_cast<uint32_t>(Number(bytes, at, 2)); }
uint32_t U32(std::string_view bytes, size_t at) { return static_cast<uint32_t>(Number(bytes, at, 4)); }

bool IsPlainName(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != std::string_view::npos ||
      name.find('\0') != std::string_view::npos)
    return false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return false;
    begin = end + 1;
  }
  return true;
}

class DirectoryReader {
 public:
  DirectoryReader(const FileReader& file, int64_t begin, int64_t bytes) : file_(file), begin_(begin), bytes_(bytes) {}

  absl::StatusOr<std::map<std::string, ZipEntry>> Read() {
    if (begin_ < 0 || bytes_ < kEndBytes || begin_ > file_.size() || bytes_ > file_.size() - begin_)
      return Broken("it is too short");
    MB_RETURN_IF_ERROR(FindDirectory());
    if (directory_bytes_ > static_cast<uint64_t>(std::min(kMaxDirectoryBytes, bytes_)) ||
        directory_offset_ > static_cast<uint64_t>(bytes_) - directory_bytes_) {
      return Broken("its list of entries is not within it");
    }
    std::string list;
    MB_RETURN_IF_ERROR(Load(static_cast<int64_t>(directory_offset_), static_cast<int64_t>(directory_bytes_), &list));
    std::map<std::string, ZipEntry> entries;
    std::string_view rest = list;
    while (!rest.empty()) MB_RETURN_IF_ERROR(ReadEntry(&rest, &entries));
    if (entries.size() != count_) return Broken(fmt::format("it lists {} entries instead of {}", entries.size(), count_));
    return entries;
  }

 private:
  absl::Status Broken(std::string_view what) const {
    return absl::DataLossError(fmt::format("{}: not a whole zip archive (at byte {}): {}", file_.path(), begin_, what));
  }
  absl::Status Refused(std::string_view what) const {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
                      fmt::format("{}: {}; archives of torch.save are not compressed", file_.path(), what));
  }
  absl::Status Load(int64_t offset, int64_t bytes, std::string* into) const {
    into->resize(static_cast<size_t>(bytes));
    return file_.ReadAt(begin_ + offset, into->data(), into->size());
  }

  // The end record is the last one; only a comment of up to 64 KiB may follow.
  absl::Status FindDirectory() {
    const int64_t tail_bytes = std::min<int64_t>(bytes_, kEndBytes + 0xffff);
    std::string tail;
    MB_RETURN_IF_ERROR(Load(bytes_ - tail_bytes, tail_bytes, &tail));
    int64_t at = tail_bytes - kEndBytes;
    while (at >= 0 && !(U32(tail, at) == kEndMark && U16(tail, at + 20) == tail_bytes - at - kEndBytes)) --at;
    if (at < 0) return Broken("it has no end record");
    count_ = U16(tail, at + 10);
    directory_bytes_ = U32(tail, at + 12);
    directory_offset_ = U32(tail, at + 16);
    const int64_t locator = bytes_ - tail_bytes + at - kLocatorBytes;
    if (locator < 0) return absl::OkStatus();
    std::string record;
    MB_RETURN_IF_ERROR(Load(locator, kLocatorBytes, &record));
    if (U32(record, 0) != kLocatorMark) return absl::OkStatus();
    const uint64_t place = Number(record, 8, 8);
    if (bytes_ < kEnd64Bytes || place > static_cast<uint64_t>(bytes_ - kEnd64Bytes))
      return Broken("its Zip64 record is not within it");
    MB_RETURN_IF_ERROR(Load(static_cast<int64_t>(place), kEnd64Bytes, &record));
    if (U32(record, 0) != kEnd64Mark) return Broken("it has no Zip64 record");
    count_ = Number(record, 32, 8);
    directory_bytes_ = Number(record, 40, 8);
    directory_offset_ = Number(record, 48, 8);
    return absl::OkStatus();
  }

  absl::Status ReadEntry(std::string_view* rest, std::map<std::string, ZipEntry>* entries) const {
    const std::string_view record = *rest;
    if (record.size() < kCentralBytes || U32(record, 0) != kCentralMark) return Broken("its list of entries is damaged");
    const size_t name_bytes = U16(record, 28), extra_bytes = U16(record, 30), comment_bytes = U16(record, 32);
    const size_t whole = kCentralBytes + name_bytes + extra_bytes + comment_bytes;
    if (record.size() < whole) return Broken("its list of entries is damaged");
    rest->remove_prefix(whole);
    const std::string name(record.substr(kCentralBytes, name_bytes));
    if (!IsPlainName(name)) return Broken(fmt::format("it has an entry named \"{}\"", name));
    if ((U16(record, 8) & 1) != 0) return Refused(fmt::format("entry {} is encrypted", name));
    if (U16(record, 10) != 0) return Refused(fmt::format("entry {} is compressed", name));
    uint64_t packed = U32(record, 20), bytes = U32(record, 24), local = U32(record, 42);
    MB_RETURN_IF_ERROR(ReadZip64(record.substr(kCentralBytes + name_bytes, extra_bytes), &bytes, &packed, &local));
    if (packed != bytes) return Broken(fmt::format("entry {} has two sizes", name));
    const auto limit = static_cast<uint64_t>(bytes_);
    if (local > limit || limit - local < kLocalBytes) return Broken(fmt::format("entry {} is not within it", name));
    std::string header;
    MB_RETURN_IF_ERROR(Load(static_cast<int64_t>(local), kLocalBytes, &header));
    if (U32(header, 0) != kLocalMark) return Broken(fmt::format("entry {} has no header", name));
    const uint64_t data = local + kLocalBytes + U16(header, 26) + U16(header, 28);
    if (data > limit || bytes > limit - data) return Broken(fmt::format("entry {} is not within it", name));
    if (!entries->insert({name, {begin_ + static_cast<int64_t>(data), static_cast<int64_t>(bytes)}}).second)
      return Broken(fmt::format("it has two entries named {}", name));
    return absl::OkStatus();
  }

  // The field holds those of the three numbers that do not fit in the record, in this order.
  absl::Status ReadZip64(std::string_view extra, uint64_t* bytes, uint64_t* packed, uint64_t* local) const {
    while (extra.size() >= 4) {
      const size_t id = U16(extra, 0), length = U16(extra, 2);
      if (extra.size() < 4 + length) return Broken("an extra field is cut off");
      std::string_view field = extra.substr(4, length);
      extra.remove_prefix(4 + length);
      if (id != 1) continue;
      for (uint64_t* number : {bytes, packed, local}) {
        if (*number != kIn64) continue;
        if (field.size() < 8) return Broken("a Zip64 field is cut off");
        *number = Number(field, 0, 8);
        field.remove_prefix(8);
      }
    }
    return absl::OkStatus();
  }

  const FileReader& file_;
  int64_t begin_, bytes_;
  uint64_t count_ = 0, directory_offset_ = 0, directory_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::map<std::string, ZipEntry>> ReadZipDirectory(const FileReader& file, int64_t begin, int64_t bytes) {
  return DirectoryReader(file, begin, bytes).Read();
}

}  // namespace mbridge
