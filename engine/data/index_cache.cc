#include "engine/data/index_cache.h"

#include <charconv>

#include <fmt/format.h>
#include <openssl/evp.h>
#include <nlohmann/json.hpp>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/core/file.h"
#include "engine/data/data_status.h"
#include "engine/data/npy.h"

namespace mbridge {
namespace {

// repr(float): shortest digits, fixed notation for exponents -4 … 15.
std::string PythonFloat(double value) {
  char buffer[64];
  auto result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  std::string text(buffer, result.ptr);
  const size_t mark = text.find('e');
  const int exponent = mark == std::string::npos ? 0 : std::stoi(text.substr(mark + 1));
  if (exponent < -4 || exponent >= 16) return text;
  result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  text.assign(buffer, result.ptr);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

void AppendJson(const nlohmann::ordered_json& value, size_t indent, std::string* out) {
  if (value.is_number_float()) {
    *out += PythonFloat(value.get<double>());
    return;
  }
  if (!value.is_structured() || value.empty()) {
    *out += value.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
    return;
  }
  *out += value.is_array() ? '[' : '{';
  bool first = true;
  for (auto item = value.begin(); item != value.end(); ++item) {
    if (!first) *out += ',';
    first = false;
    *out += '\n';
    out->append(indent + 4, ' ');
    if (value.is_object()) {
      AppendJson(item.key(), indent + 4, out);
      *out += ": ";
    }
    AppendJson(*item, indent + 4, out);
  }
  *out += '\n';
  out->append(indent, ' ');
  *out += value.is_array() ? ']' : '}';
}

std::string Md5Hex(const std::string& text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_Digest(text.data(), text.size(), digest, &length, EVP_md5(), nullptr);
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

std::string ContentOf(const std::string& path) {
  auto file = MappedFile::Open(path);
  if (!file.ok()) return "";
  return std::string(reinterpret_cast<const char*>((*file)->data()), static_cast<size_t>((*file)->size()));
}

template <class T> std::string Checksum(std::span<const T> values) {
  return fmt::format("{:016x}", XXH3_64bits(values.data(), values.size_bytes()));
}

std::string Sidecar(const IndexCacheKey& key, const std::vector<std::string>& checksums) {
  std::string text = key.fingerprint + "\nxxh3";
  for (const std::string& checksum : checksums) text += " " + checksum;
  return text + "\n";
}
std::vector<std::string> ChecksumsOf(const GptIndex& index) {
  return {Checksum(index.document.values), Checksum(index.sample.values), Checksum(index.shuffle.values)};
}

// The sidecar's text where it and the description belong to this key; the checksums are still to be compared.
std::optional<std::string> CurrentSidecar(const IndexCacheKey& key) {
  std::string sidecar = ContentOf(key.Path("mbridge.txt"));
  if (!sidecar.starts_with(key.fingerprint + "\n") || ContentOf(key.Path("description.txt")) != key.description)
    return std::nullopt;
  return sidecar;
}

template <class T> bool LoadArray(const std::string& path, const std::vector<int64_t>& shape, SharedArray<T>* array) {
  auto file = MappedFile::Open(path);
  if (!file.ok()) return false;
  const auto values = ReadNpy<T>(**file, shape);
  if (!values) return false;
  *array = {*file, *values};
  return true;
}

// The sidecar goes first and comes back last, so that it never vouches for a mixture.
absl::Status BeginSave(const IndexCacheKey& key) {
  MB_RETURN_IF_ERROR(MakeDirectories(key.folder));
  return RemoveAll(key.Path("mbridge.txt"));
}

absl::Status EndSave(const IndexCacheKey& key, const std::vector<std::string>& checksums) {
  MB_RETURN_IF_ERROR(WriteFileDurably(key.Path("description.txt"), key.description));
  return WriteFileDurably(key.Path("mbridge.txt"), Sidecar(key, checksums));
}

}  // namespace

std::string PythonJson(const nlohmann::ordered_json& value) {
  std::string text;
  AppendJson(value, 0, &text);
  return text;
}

IndexCacheKey::IndexCacheKey(std::string folder, std::string class_name, Split split, std::string description,
                             std::string fingerprint)
    : folder(std::move(folder)),
      class_name(std::move(class_name)),
      split(split),
      description(std::move(description)),
      fingerprint(std::move(fingerprint)),
      md5(Md5Hex(this->description)) {}

std::string IndexCacheKey::Path(const std::string& suffix) const {
  return fmt::format("{}/{}-{}-{}-{}", folder, md5, class_name, NameOf(split), suffix);
}

std::optional<GptIndex> LoadGptIndex(const IndexCacheKey& key, const TokenSource& source, const GptIndexOptions& options,
                                     const GptIndexPlan& plan) {
  const auto sidecar = CurrentSidecar(key);
  if (!sidecar) return std::nullopt;
  GptIndex index;
  const int64_t documents = plan.epochs * (options.sequences.end - options.sequences.begin);
  if (!LoadArray(key.Path("document_index.npy"), {documents}, &index.document)) return std::nullopt;
  if (!LoadArray(key.Path("sample_index.npy"), {plan.samples + 1, 2}, &index.sample)) return std::nullopt;
  if (!LoadArray(key.Path("shuffle_index.npy"), {plan.samples}, &index.shuffle)) return std::nullopt;
  if (*sidecar != Sidecar(key, ChecksumsOf(index)) || !IsConsistent(index, source, options, plan)) return std::nullopt;
  return index;
}

absl::Status SaveGptIndex(const IndexCacheKey& key, const GptIndex& index) {
  MB_RETURN_IF_ERROR(BeginSave(key));
  const int64_t documents = static_cast<int64_t>(index.document.values.size());
  const int64_t samples = static_cast<int64_t>(index.shuffle.values.size());
  MB_RETURN_IF_ERROR(WriteNpy(key.Path("document_index.npy"), {documents}, index.document.values));
  MB_RETURN_IF_ERROR(WriteNpy(key.Path("sample_index.npy"), {samples + 1, 2}, index.sample.values));
  MB_RETURN_IF_ERROR(WriteNpy(key.Path("shuffle_index.npy"), {samples}, index.shuffle.values));
  return EndSave(key, ChecksumsOf(index));
}

std::optional<BlendIndex> LoadBlendIndex(const IndexCacheKey& key, int64_t size, const std::vector<int64_t>& part_sizes) {
  SharedArray<int16_t> dataset;
  SharedArray<int64_t> dataset_sample;
  const auto sidecar = CurrentSidecar(key);
  if (!sidecar) return std::nullopt;
  if (!LoadArray(key.Path("dataset_index.npy"), {size}, &dataset)) return std::nullopt;
  if (!LoadArray(key.Path("dataset_sample_index.npy"), {size}, &dataset_sample)) return std::nullopt;
  if (*sidecar != Sidecar(key, {Checksum(dataset.values), Checksum(dataset_sample.values)})) return std::nullopt;
  for (size_t i = 0; i < dataset.values.size(); ++i) {
    const int16_t part = dataset.values[i];
    if (part < 0 || static_cast<size_t>(part) >= part_sizes.size()) return std::nullopt;
    if (dataset_sample.values[i] < 0 || dataset_sample.values[i] >= part_sizes[static_cast<size_t>(part)]) return std::nullopt;
  }
  return BlendIndex{{dataset.values.begin(), dataset.values.end()}, {dataset_sample.values.begin(), dataset_sample.values.end()}};
}

absl::Status SaveBlendIndex(const IndexCacheKey& key, const BlendIndex& index) {
  MB_RETURN_IF_ERROR(BeginSave(key));
  const int64_t size = static_cast<int64_t>(index.dataset.size());
  MB_RETURN_IF_ERROR(WriteNpy(key.Path("dataset_index.npy"), {size}, std::span<const int16_t>(index.dataset)));
  MB_RETURN_IF_ERROR(WriteNpy(key.Path("dataset_sample_index.npy"), {size}, std::span<const int64_t>(index.dataset_sample)));
  return EndSave(key,
                 {Checksum(std::span<const int16_t>(index.dataset)), Checksum(std::span<const int64_t>(index.dataset_sample))});
}

}  // namespace mbridge
