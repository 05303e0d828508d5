#include "engine/bridge/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

absl::Status Broken(const std::string& path, const std::string& what) {
  return absl::DataLossError(fmt::format("{} is not a safetensors file: {}", path, what));
}

// The header as JSON; a key that stands twice in one object is an error, which the parser itself would let pass.
absl::StatusOr<json> ParseObject(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> open;
  std::string twice;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start: open.emplace_back(); break;
      case json::parse_event_t::object_end: open.pop_back(); break;
      case json::parse_event_t::key:
        if (!open.back().insert(value.get<std::string>()).second && twice.empty()) twice = value.get<std::string>();
        break;
      default: break;
    }
    return true;
  };
  json header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (!header.is_object()) return Broken(path, "its header is not a JSON object");
  if (!twice.empty()) return Broken(path, fmt::format("its header has the key \"{}\" twice", twice));
  return header;
}

bool IsSize(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

// One tensor's object. entry->offset counts from `data_begin`, the first byte after the header.
absl::Status ReadEntry(const std::string& path, const std::string& name, const json& value, int64_t data_begin,
                       int64_t data_bytes, SafetensorsEntry* entry) {
  const auto broken = [&](const std::string& what) { return Broken(path, fmt::format("tensor \"{}\" {}", name, what)); };
  if (!value.is_object()) return broken("is not described by an object");
  const auto dtype = value.find("dtype"), shape = value.find("shape"), offsets = value.find("data_offsets");
  if (dtype == value.end() || !dtype->is_string()) return broken("has no dtype");
  if (shape == value.end() || !shape->is_array()) return broken("has no shape");
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2) return broken("has no pair of data_offsets");
  entry->name = name;
  entry->dtype = dtype->get<std::string>();
  const int64_t element = SafetensorsElementBytes(entry->dtype);
  if (element == 0) return broken(fmt::format("has the unknown dtype {}", entry->dtype));
  int64_t bytes = element;
  for (const json& dim : *shape) {
    if (!IsSize(dim)) return broken("has a shape that is not made of sizes");
    entry->shape.push_back(dim.get<int64_t>());
    if (__builtin_mul_overflow(bytes, entry->shape.back(), &bytes)) return broken("has a shape of more than 2^63 bytes");
  }
  if (!IsSize((*offsets)[0]) || !IsSize((*offsets)[1])) return broken("has data_offsets that are not sizes");
  const int64_t begin = (*offsets)[0].get<int64_t>(), end = (*offsets)[1].get<int64_t>();
  if (begin > end || end > data_bytes) {
    return broken(fmt::format("has data_offsets [{}, {}] in {} bytes of data", begin, end, data_bytes));
  }
  if (end - begin != bytes) {
    return broken(fmt::format("has {} bytes of data, its shape and dtype make {}", end - begin, bytes));
  }
  entry->offset = data_begin + begin;
  entry->bytes = bytes;
  return absl::OkStatus();
}

}  // namespace

int64_t SafetensorsEntry::NumElements() const { return bytes / SafetensorsElementBytes(dtype); }

int64_t SafetensorsElementBytes(std::string_view dtype) {
  static constexpr std::pair<std::string_view, int64_t> kTypes[] = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
      {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  for (const auto& [word, bytes] : kTypes) {
    if (word == dtype) return bytes;
  }
  return 0;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  MB_ASSIGN_OR_RETURN(FileReader reader, FileReader::Open(path));
  SafetensorsFile file(std::move(reader));
  const int64_t size = file.file_.size();
  if (size < kLengthBytes) return Broken(path, fmt::format("it has {} bytes", size));
  unsigned char digits[kLengthBytes];
  MB_RETURN_IF_ERROR(file.file_.ReadAt(0, digits, sizeof digits));
  uint64_t length = 0;
  for (int i = kLengthBytes; i-- > 0;) length = length << 8 | digits[i];
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return Broken(path, fmt::format("its header would have {} bytes; at most {}", length, kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > size - kLengthBytes) {
    return Broken(path, fmt::format("its header would have {} bytes in a file of {}", header_bytes, size));
  }
  std::string text(static_cast<size_t>(header_bytes), '\0');
  MB_RETURN_IF_ERROR(file.file_.ReadAt(kLengthBytes, text.data(), text.size()));
  if (text.empty() || text.front() != '{') return Broken(path, "its header does not begin with {");
  MB_RETURN_IF_ERROR(file.ParseHeader(text, kLengthBytes + header_bytes));
  return file;
}

absl::Status SafetensorsFile::ParseHeader(const std::string& text, int64_t data_begin) {
  MB_ASSIGN_OR_RETURN(const json header, ParseObject(path(), text));
  const int64_t data_bytes = file_.size() - data_begin;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) return Broken(path(), "__metadata__ is not an object");
      for (const auto& [key, word] : value.items()) {
        if (!word.is_string()) return Broken(path(), fmt::format("__metadata__ has no text for \"{}\"", key));
        metadata_[key] = word.get<std::string>();
      }
      continue;
    }
    SafetensorsEntry entry;
    MB_RETURN_IF_ERROR(ReadEntry(path(), name, value, data_begin, data_bytes, &entry));
    entries_.push_back(std::move(entry));
  }
  const auto place = [](const SafetensorsEntry& entry) { return std::tie(entry.offset, entry.bytes, entry.name); };
  std::sort(entries_.begin(), entries_.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
  int64_t covered = data_begin;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const SafetensorsEntry& entry = entries_[i];
    if (entry.offset != covered) {
      return Broken(path(),
                    fmt::format("tensor \"{}\" begins at byte {}, the one before ends at {}", entry.name, entry.offset, covered));
    }
    covered += entry.bytes;
    index_[entry.name] = i;
  }
  if (covered != file_.size()) {
    return Broken(path(), fmt::format("its tensors end at byte {} of {}", covered, file_.size()));
  }
  return absl::OkStatus();
}

const SafetensorsEntry* SafetensorsFile::Find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

absl::Status SafetensorsFile::Read(const SafetensorsEntry& entry, void* data) const {
  return file_.ReadAt(entry.offset, data, static_cast<size_t>(entry.bytes));
}

}  // namespace mbridge
