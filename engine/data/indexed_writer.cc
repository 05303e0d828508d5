#include "engine/data/indexed_writer.h"

#include <cstring>
#include <filesystem>
#include <limits>

#include <unistd.h>

#include <fmt/format.h>

#include "engine/data/data_status.h"
#include "engine/data/durable_file.h"

namespace mbridge {
namespace {

template <class T> absl::Status Pack(std::span<const int32_t> tokens, int64_t sequence, std::vector<char>* out) {
  out->resize(tokens.size() * sizeof(T));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < static_cast<int64_t>(std::numeric_limits<T>::min()) ||
        tokens[i] > static_cast<int64_t>(std::numeric_limits<T>::max())) {
      return DataError(absl::StatusCode::kOutOfRange,
                       fmt::format("token {} of sequence {}: id {} does not fit {} bytes a token; choose a wider token type", i,
                                   sequence, tokens[i], sizeof(T)));
    }
    const T value = static_cast<T>(tokens[i]);
    std::memcpy(out->data() + i * sizeof(T), &value, sizeof value);
  }
  return absl::OkStatus();
}

absl::Status PackAs(TokenType type, std::span<const int32_t> tokens, int64_t sequence, std::vector<char>* out) {
  switch (type) {
    case TokenType::kUint8: return Pack<uint8_t>(tokens, sequence, out);
    case TokenType::kInt8: return Pack<int8_t>(tokens, sequence, out);
    case TokenType::kInt16: return Pack<int16_t>(tokens, sequence, out);
    case TokenType::kUint16: return Pack<uint16_t>(tokens, sequence, out);
    case TokenType::kInt64: return Pack<int64_t>(tokens, sequence, out);
    default: return Pack<int32_t>(tokens, sequence, out);
  }
}

template <class T> absl::Status AppendValue(DurableFile& file, T value) { return file.Append(&value, sizeof value); }

}  // namespace

absl::StatusOr<std::unique_ptr<IndexedWriter>> IndexedWriter::Create(const std::string& prefix, TokenType type, bool overwrite) {
  if (type == TokenType::kFloat32 || type == TokenType::kFloat64) {
    return DataError(absl::StatusCode::kInvalidArgument, fmt::format("{}: token ids are integers, not {}", prefix, NameOf(type)));
  }
  std::error_code error;
  for (const char* extension : {".idx", ".bin"}) {
    if (!overwrite && std::filesystem::exists(prefix + extension, error)) {
      return DataError(absl::StatusCode::kAlreadyExists,
                       fmt::format("{}{} exists; choose another output prefix or allow overwriting", prefix, extension));
    }
  }
  const auto folder = std::filesystem::path(prefix).parent_path();
  if (!folder.empty()) MB_RETURN_IF_ERROR(MakeDirectories(folder.string()));
  std::unique_ptr<IndexedWriter> writer(new IndexedWriter);
  writer->prefix_ = prefix;
  writer->type_ = type;
  MB_ASSIGN_OR_RETURN(writer->bin_, DurableFile::Create(prefix + ".bin"));
  return writer;
}

IndexedWriter::~IndexedWriter() = default;

absl::Status IndexedWriter::AddSequence(std::span<const int32_t> tokens) {
  if (sequences() == INT32_MAX || tokens.size() > static_cast<size_t>(INT32_MAX)) {
    return DataError(absl::StatusCode::kOutOfRange,
                     fmt::format("{}: at most 2^31 - 1 sequences of 2^31 - 1 tokens in one set; split it", prefix_));
  }
  MB_RETURN_IF_ERROR(PackAs(type_, tokens, sequences(), &packed_));
  MB_RETURN_IF_ERROR(bin_->Append(packed_.data(), packed_.size()));
  lengths_.push_back(static_cast<int32_t>(tokens.size()));
  tokens_ += static_cast<int64_t>(tokens.size());
  return absl::OkStatus();
}

void IndexedWriter::EndDocument() { document_begins_.push_back(sequences()); }

absl::Status IndexedWriter::Finish() {
  if (document_begins_.back() != sequences()) {
    return DataError(absl::StatusCode::kFailedPrecondition, fmt::format("{}: the last document was not ended", prefix_));
  }
  MB_ASSIGN_OR_RETURN(auto index, DurableFile::Create(prefix_ + ".idx"));
  MB_RETURN_IF_ERROR(index->Append("MMIDIDX\0\0", 9));
  MB_RETURN_IF_ERROR(AppendValue<uint64_t>(*index, 1));
  MB_RETURN_IF_ERROR(AppendValue<uint8_t>(*index, static_cast<uint8_t>(type_)));
  MB_RETURN_IF_ERROR(AppendValue<uint64_t>(*index, lengths_.size()));
  MB_RETURN_IF_ERROR(AppendValue<uint64_t>(*index, document_begins_.size()));
  MB_RETURN_IF_ERROR(index->Append(lengths_.data(), lengths_.size() * sizeof(int32_t)));
  int64_t pointer = 0;
  for (int32_t length : lengths_) {
    MB_RETURN_IF_ERROR(AppendValue<int64_t>(*index, pointer));
    pointer += length * SizeOf(type_);
  }
  MB_RETURN_IF_ERROR(index->Append(document_begins_.data(), document_begins_.size() * sizeof(int64_t)));
  MB_RETURN_IF_ERROR(bin_->Sync());
  MB_RETURN_IF_ERROR(index->Sync());
  unlink((prefix_ + ".idx").c_str());  // An old index must not meet the new tokens, should the machine stop here.
  MB_RETURN_IF_ERROR(bin_->Commit());
  return index->Commit();
}

}  // namespace mbridge
