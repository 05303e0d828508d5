#include "engine/data/indexed_dataset.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <fmt/format.h>

#include "engine/data/data_status.h"

namespace mbridge {
namespace {

constexpr int64_t kHeaderBytes = 34;
constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};

template <class T> T Load(const unsigned char* data, int64_t i = 0) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T> int32_t ToId(T value) {
  if constexpr (sizeof(T) > 4) {
    return value < 0 || value > INT32_MAX ? -1 : static_cast<int32_t>(value);
  } else {
    return static_cast<int32_t>(value);
  }
}

template <class T> void Convert(const unsigned char* data, int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = ToId(Load<T>(data, i));
}

template <class T> IdRange RangeOf(const unsigned char* data, int64_t count) {
  if (count == 0) return {};
  T low = Load<T>(data), high = low;
  for (int64_t i = 1; i < count; ++i) {
    const T value = Load<T>(data, i);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  return {static_cast<int64_t>(low), static_cast<int64_t>(high)};
}

// Calls function.template operator()<T>() with the integer type of `type`.
template <class Function> auto Dispatch(TokenType type, Function function) {
  switch (type) {
    case TokenType::kUint8: return function.template operator()<uint8_t>();
    case TokenType::kInt8: return function.template operator()<int8_t>();
    case TokenType::kInt16: return function.template operator()<int16_t>();
    case TokenType::kInt64: return function.template operator()<int64_t>();
    case TokenType::kUint16: return function.template operator()<uint16_t>();
    default: return function.template operator()<int32_t>();
  }
}

std::string HintFor(const std::string& prefix) {
  if (prefix.ends_with(".idx") || prefix.ends_with(".bin")) {
    return fmt::format("; give the prefix without its extension: {}", prefix.substr(0, prefix.size() - 4));
  }
  double number;
  const auto result = std::from_chars(prefix.data(), prefix.data() + prefix.size(), number);
  if (!prefix.empty() && result.ptr == prefix.data() + prefix.size()) {
    return "; it looks like a weight: a blend is weight, prefix, weight, prefix, … or prefixes only";
  }
  return "; a data prefix needs <prefix>.idx and <prefix>.bin, which `mbctl data preprocess` makes";
}

}  // namespace

int64_t SizeOf(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
    case TokenType::kInt8: return 1;
    case TokenType::kInt16:
    case TokenType::kUint16: return 2;
    case TokenType::kInt32:
    case TokenType::kFloat32: return 4;
    case TokenType::kInt64:
    case TokenType::kFloat64: return 8;
  }
  return 0;
}

std::string_view NameOf(TokenType type) {
  switch (type) {
    case TokenType::kUint8: return "uint8";
    case TokenType::kInt8: return "int8";
    case TokenType::kInt16: return "int16";
    case TokenType::kInt32: return "int32";
    case TokenType::kInt64: return "int64";
    case TokenType::kFloat64: return "float64";
    case TokenType::kFloat32: return "float32";
    case TokenType::kUint16: return "uint16";
  }
  return "?";
}

TokenType TokenTypeFor(int64_t vocab_size) { return vocab_size < 65500 ? TokenType::kUint16 : TokenType::kInt32; }

absl::StatusOr<std::shared_ptr<const IndexedDataset>> IndexedDataset::Open(const std::string& prefix) {
  std::shared_ptr<IndexedDataset> dataset(new IndexedDataset);
  dataset->prefix_ = prefix;
  for (auto [extension, file] : {std::pair{".idx", &dataset->index_}, std::pair{".bin", &dataset->bin_}}) {
    auto opened = MappedFile::Open(prefix + extension);
    if (absl::IsNotFound(opened.status())) {
      return DataNotFound(std::string(opened.status().message()) + HintFor(prefix));
    }
    MB_RETURN_IF_ERROR(opened.status());
    *file = *std::move(opened);
  }
  MB_RETURN_IF_ERROR(dataset->ParseHeader());
  MB_RETURN_IF_ERROR(dataset->CheckDocuments());
  MB_RETURN_IF_ERROR(dataset->CheckSequences());
  return std::shared_ptr<const IndexedDataset>(std::move(dataset));
}

absl::Status IndexedDataset::BadField(std::string_view field, int64_t offset, const std::string& expected,
                                      const std::string& found) const {
  return DamagedData(
      fmt::format("{}: {} (byte {}): expected {}, found {}; the file is truncated, damaged or not an "
                  "IndexedDataset, make it again with `mbctl data preprocess`",
                  index_->path(), field, offset, expected, found));
}

absl::Status IndexedDataset::ParseHeader() {
  const unsigned char* data = index_->data();
  const int64_t size = index_->size();
  if (size < kHeaderBytes) return BadField("file size", 0, "at least 34 bytes of header", fmt::format("{}", size));
  if (std::memcmp(data, kMagic, sizeof kMagic) != 0) {
    std::string found;
    for (size_t i = 0; i < sizeof kMagic; ++i) found += fmt::format("{:02x}", data[i]);
    return BadField("magic", 0, "4d4d49444944580000 (MMIDIDX)", found);
  }
  const uint64_t version = Load<uint64_t>(data + 9);
  if (version != 1) return BadField("version", 9, "1", fmt::format("{}", version));
  const int code = data[17];
  if (code < 1 || code > 8) return BadField("dtype code", 17, "1 to 8", fmt::format("{}", code));
  type_ = static_cast<TokenType>(code);
  if (type_ == TokenType::kFloat32 || type_ == TokenType::kFloat64) {
    return BadField("dtype code", 17, "an integer type for token ids", std::string(NameOf(type_)));
  }
  const uint64_t sequences = Load<uint64_t>(data + 18), boundaries = Load<uint64_t>(data + 26);
  const int64_t room = size - kHeaderBytes;
  if (sequences > static_cast<uint64_t>(std::min<int64_t>(room / 12, INT32_MAX))) {
    return BadField("sequence count", 18, fmt::format("at most {}, by the file size of {} bytes", room / 12, size),
                    fmt::format("{}", sequences));
  }
  const int64_t rest = room - 12 * static_cast<int64_t>(sequences);
  if (boundaries < 1 || boundaries > static_cast<uint64_t>(rest / 8)) {
    return BadField("document boundary count", 26, fmt::format("1 to {}, by the file size of {} bytes", rest / 8, size),
                    fmt::format("{}", boundaries));
  }
  const int64_t excess = rest - 8 * static_cast<int64_t>(boundaries);
  if (excess != 0 && excess != static_cast<int64_t>(sequences)) {  // Multimodal sets append one byte a sequence.
    return BadField("file size", 0, fmt::format("{} bytes, by its counts", size - excess), fmt::format("{}", size));
  }
  SetLengths(data + kHeaderBytes, static_cast<int64_t>(sequences));
  pointers_ = data + kHeaderBytes + 4 * static_cast<int64_t>(sequences);
  document_begins_ = pointers_ + 8 * static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(boundaries) - 1;
  return absl::OkStatus();
}

absl::Status IndexedDataset::CheckDocuments() const {
  const int64_t base = document_begins_ - index_->data();
  int64_t previous = 0;
  for (int64_t i = 0; i <= documents_; ++i) {
    const int64_t begin = document_begin(i);
    if (i == 0 ? begin != 0 : begin < previous) {
      return BadField(fmt::format("document boundary {}", i), base + 8 * i, i == 0 ? "0" : fmt::format("at least {}", previous),
                      fmt::format("{}", begin));
    }
    previous = begin;
  }
  if (previous != sequences()) {
    return BadField("last document boundary", base + 8 * documents_, fmt::format("the sequence count {}", sequences()),
                    fmt::format("{}", previous));
  }
  return absl::OkStatus();
}

absl::Status IndexedDataset::CheckSequences() {
  const int64_t width = SizeOf(type_);
  for (int64_t i = 0; i < sequences(); ++i) {
    const int64_t tokens = length(i), begin = pointer(i);
    if (tokens < 0) {
      return BadField(fmt::format("length of sequence {}", i), kHeaderBytes + 4 * i, "0 or more", fmt::format("{}", tokens));
    }
    if (begin < 0 || begin > bin_->size()) {
      return BadField(fmt::format("offset of sequence {}", i), pointers_ - index_->data() + 8 * i,
                      fmt::format("0 to {}, the size of {}", bin_->size(), bin_->path()), fmt::format("{}", begin));
    }
    if (tokens * width > bin_->size() - begin) {
      return DamagedData(
          fmt::format("{}: sequence {} of {}: expected {} tokens of {} at byte {}, that is at least {} bytes, "
                      "found {}; the file is truncated or belongs to another .idx",
                      bin_->path(), i, sequences(), tokens, NameOf(type_), begin, begin + tokens * width, bin_->size()));
    }
    tokens_ += tokens;
  }
  return absl::OkStatus();
}

absl::Status IndexedDataset::CheckLayout() const {
  int64_t expected = 0;
  for (int64_t i = 0; i < sequences(); ++i) {
    if (pointer(i) != expected) {
      return BadField(fmt::format("offset of sequence {}", i), pointers_ - index_->data() + 8 * i,
                      fmt::format("{}, the end of the sequence before", expected), fmt::format("{}", pointer(i)));
    }
    expected += length(i) * SizeOf(type_);
  }
  if (bin_->size() != expected) {
    return DamagedData(
        fmt::format("{}: file size: expected {} bytes, by its .idx, found {}; the two files are not of one "
                    "build",
                    bin_->path(), expected, bin_->size()));
  }
  return absl::OkStatus();
}

int64_t IndexedDataset::document_begin(int64_t i) const { return Load<int64_t>(document_begins_, i); }
int64_t IndexedDataset::pointer(int64_t sequence) const { return Load<int64_t>(pointers_, sequence); }

void IndexedDataset::Read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const {
  if (count == 0) return;
  const unsigned char* data = bin_->data() + pointer(sequence) + offset * SizeOf(type_);
  Dispatch(type_, [&]<class T>() { Convert<T>(data, count, out); });
}

IdRange IndexedDataset::ScanIds(int64_t begin, int64_t end) const {
  IdRange range;
  for (int64_t i = begin; i < end;) {
    // Neighbours in the file are read as one run.
    const int64_t first = pointer(i);
    int64_t bytes = length(i) * SizeOf(type_);
    for (++i; i < end && pointer(i) == first + bytes && bytes < (1 << 26); ++i) bytes += length(i) * SizeOf(type_);
    if (bytes == 0) continue;
    const IdRange part =
        Dispatch(type_, [&]<class T>() { return RangeOf<T>(bin_->data() + first, bytes / static_cast<int64_t>(sizeof(T))); });
    range.min = std::min(range.min, part.min);
    range.max = std::max(range.max, part.max);
  }
  return range;
}

int64_t IndexedDataset::FindBadId(int64_t vocab_size, int64_t* id) const {
  constexpr int64_t kBlock = 4096;
  const auto bad = [&](const IdRange& range) { return range.min <= range.max && (range.min < 0 || range.max >= vocab_size); };
  for (int64_t begin = 0; begin < sequences(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, sequences());
    if (!bad(ScanIds(begin, end))) continue;
    for (int64_t i = begin; i < end; ++i) {
      const IdRange range = ScanIds(i, i + 1);
      if (!bad(range)) continue;
      *id = range.min < 0 ? range.min : range.max;
      return i;
    }
  }
  return -1;
}

}  // namespace mbridge
