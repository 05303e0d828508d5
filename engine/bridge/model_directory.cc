#include "engine/bridge/model_directory.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include <fmt/format.h>
#include <xxhash.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/config_form.h"
#include "engine/core/file.h"

namespace mbridge {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxJsonBytes = int64_t{256} << 20;
constexpr const char* kSideFiles[] = {"generation_config.json",
                                      "tokenizer.json",
                                      "tokenizer_config.json",
                                      "tokenizer.model",
                                      "special_tokens_map.json",
                                      "added_tokens.json",
                                      "vocab.json",
                                      "vocab.txt",
                                      "merges.txt",
                                      "chat_template.json",
                                      "chat_template.jinja",
                                      "tekken.json",
                                      "spiece.model",
                                      "preprocessor_config.json"};

// The request names what is no model.
absl::Status NoModel(absl::StatusCode code, const std::string& message) {
  return MakeStatus(code, v1::REASON_INVALID_REQUEST, message);
}

absl::Status NoDirectory(const std::string& path) {
  return NoModel(
      absl::StatusCode::kNotFound,
      fmt::format("{} is not a directory of the node: give the folder with config.json and the .safetensors files", path));
}

bool EndsWithAny(const std::string& name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

std::string FirstOf(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::vector<std::string> shown(names.begin(), names.begin() + std::min(names.size(), kShown));
  std::string text = absl::StrJoin(shown, ", ");
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

std::vector<std::string> HubCaches() {
  std::vector<std::string> caches;
  const auto add = [&](const char* variable, const char* below) {
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0')
      caches.push_back(std::string(value) + below);
  };
  add("HF_HUB_CACHE", "");
  add("HUGGINGFACE_HUB_CACHE", "");
  add("HF_HOME", "/hub");
  add("XDG_CACHE_HOME", "/huggingface/hub");
  add("HOME", "/.cache/huggingface/hub");
  return caches;
}

// The snapshot of a cached repository, "" when there is none to choose.
std::string Snapshot(const std::string& repository) {
  const absl::StatusOr<std::string> main = ReadWholeFile(repository + "/refs/main", 4096);
  std::error_code error;
  if (main.ok()) {
    const std::string named = fmt::format("{}/snapshots/{}", repository, main->substr(0, main->find_first_of(" \r\n")));
    if (fs::is_directory(named, error)) return named;
  }
  std::vector<std::string> all;
  for (fs::directory_iterator it(repository + "/snapshots", error), end; !error && it != end; it.increment(error)) {
    all.push_back(it->path().string());
  }
  return all.size() == 1 ? all[0] : "";
}

}  // namespace

absl::Status CheckRoots(const std::string& path, const AllowedRoots& roots) {
  if (roots.empty()) return absl::OkStatus();
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) return FileError(error.value(), "follow", path);
  for (const std::string& root : roots) {
    const fs::path base = fs::weakly_canonical(root, error);
    const fs::path relative = real.lexically_relative(base);
    if (!relative.empty() && *relative.begin() != "..") return absl::OkStatus();
  }
  return MakeStatus(absl::StatusCode::kPermissionDenied, v1::REASON_PATH_OUTSIDE_ROOTS,
                    fmt::format("{} leads to {}, which is beneath none of the allowed roots: {}", path, real.string(),
                                absl::StrJoin(roots, ", ")));
}

absl::StatusOr<std::string> FindModelDirectory(const std::string& directory_or_name) {
  std::error_code error;
  if (fs::is_directory(directory_or_name, error)) return directory_or_name;
  const size_t slash = directory_or_name.find('/');
  const bool is_name = slash != std::string::npos && slash > 0 && slash + 1 < directory_or_name.size() &&
                       directory_or_name.find('/', slash + 1) == std::string::npos && directory_or_name[0] != '.';
  if (!is_name) return NoDirectory(directory_or_name);
  const std::string folder =
      fmt::format("models--{}--{}", directory_or_name.substr(0, slash), directory_or_name.substr(slash + 1));
  for (const std::string& cache : HubCaches()) {
    if (std::string found = Snapshot(cache + "/" + folder); !found.empty()) return found;
  }
  return NoModel(absl::StatusCode::kNotFound,
                 fmt::format("{} is neither a directory nor a model in the local hub cache. Download it first: `hf download {}`",
                             directory_or_name, directory_or_name));
}

absl::StatusOr<ModelDirectory> ModelDirectory::Open(const std::string& path, const AllowedRoots& roots) {
  ModelDirectory model;
  model.path_ = path;
  std::error_code error;
  if (!fs::is_directory(path, error)) return NoDirectory(path);
  MB_RETURN_IF_ERROR(CheckRoots(path, roots));
  MB_RETURN_IF_ERROR(model.ReadConfig(roots));
  std::vector<std::string> present;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    present.push_back(it->path().filename());
  }
  if (error) return FileError(error.value(), "list", path);
  std::sort(present.begin(), present.end());
  MB_ASSIGN_OR_RETURN(const std::vector<std::string> files, model.ChooseFiles(present));
  MB_RETURN_IF_ERROR(model.OpenFiles(files, roots));
  for (const char* name : kSideFiles) {
    if (!std::binary_search(present.begin(), present.end(), name)) continue;
    MB_RETURN_IF_ERROR(CheckRoots(path + "/" + name, roots));
    model.side_files_.push_back(name);
  }
  model.NoteTypes();
  return model;
}

absl::StatusOr<Json> ModelDirectory::ReadConfigOf(const std::string& path, const AllowedRoots& roots) {
  ModelDirectory model;
  model.path_ = path;
  std::error_code error;
  if (!fs::is_directory(path, error)) return NoDirectory(path);
  MB_RETURN_IF_ERROR(CheckRoots(path, roots));
  MB_RETURN_IF_ERROR(model.ReadConfig(roots));
  return std::move(model.config_);
}

absl::Status ModelDirectory::ReadConfig(const AllowedRoots& roots) {
  const std::string file = path_ + "/config.json";
  std::error_code error;
  if (!fs::exists(file, error)) {
    if (fs::exists(path_ + "/adapter_config.json", error)) {
      return NoModel(
          absl::StatusCode::kInvalidArgument,
          fmt::format("{} holds an adapter (adapter_config.json), not a model: merge it into its base model first", path_));
    }
    return NoModel(absl::StatusCode::kNotFound, fmt::format("{} has no config.json: it is not a Hugging Face model", path_));
  }
  MB_RETURN_IF_ERROR(CheckRoots(file, roots));
  MB_ASSIGN_OR_RETURN(config_text_, ReadWholeFile(file, kMaxJsonBytes));
  MB_ASSIGN_OR_RETURN(config_, ParseConfigJson(config_text_, file));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ModelDirectory::ChooseFiles(const std::vector<std::string>& present) {
  const auto has = [&](const std::string& name) { return std::binary_search(present.begin(), present.end(), name); };
  std::vector<std::string> weights, pickled;
  for (const std::string& name : present) {
    if (name.ends_with(".safetensors") && name.starts_with("model")) weights.push_back(name);
    if (EndsWithAny(name, {".bin", ".pt", ".pth"}) && name != "training_args.bin") pickled.push_back(name);
  }
  std::vector<std::string> missing;
  if (has(kIndexName)) {
    MB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path_ + "/" + kIndexName, kMaxJsonBytes));
    MB_ASSIGN_OR_RETURN(const Json index, ParseConfigJson(text, path_ + "/" + kIndexName));
    const auto map = index.find("weight_map");
    if (map == index.end() || !map->is_object()) {
      return NoModel(absl::StatusCode::kInvalidArgument, fmt::format("{}/{} has no weight_map", path_, kIndexName));
    }
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : map->items()) {
      if (!shard.is_string() || shard.get<std::string>().find('/') != std::string::npos) {
        return NoModel(absl::StatusCode::kInvalidArgument,
                       fmt::format("{}/{}: the shard of {} is not a file name", path_, kIndexName, tensor));
      }
      expected_[tensor] = shard;
      shards.insert(shard);
    }
    for (const std::string& shard : shards) {
      if (!has(shard)) missing.push_back(shard);
    }
    if (missing.empty()) return std::vector<std::string>(shards.begin(), shards.end());
    notes_.push_back(fmt::format("{} is stale: it names {}, which are not there", kIndexName, FirstOf(missing)));
  }
  if (!weights.empty()) return weights;
  if (!missing.empty()) {
    return NoModel(absl::StatusCode::kNotFound, fmt::format("{}: the shards {} that {} names are missing; download them again",
                                                            path_, FirstOf(missing), kIndexName));
  }
  if (!pickled.empty()) {
    return NoModel(
        absl::StatusCode::kInvalidArgument,
        fmt::format("{} has its weights only as {}: such files are pickles, and reading one runs code from it. Save the model as "
                    "safetensors where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; "
                    "M.from_pretrained('{}').save_pretrained('NEW_DIR')\"",
                    path_, FirstOf(pickled), path_));
  }
  return NoModel(absl::StatusCode::kNotFound, fmt::format("{} has no model*.safetensors", path_));
}

absl::Status ModelDirectory::OpenFiles(const std::vector<std::string>& names, const AllowedRoots& roots) {
  for (const std::string& name : names) {
    MB_RETURN_IF_ERROR(CheckRoots(path_ + "/" + name, roots));
    MB_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path_ + "/" + name));
    files_.push_back(std::move(file));
  }
  for (size_t f = 0; f < files_.size(); ++f) {
    for (size_t e = 0; e < files_[f].entries().size(); ++e) {
      const SafetensorsEntry& entry = files_[f].entries()[e];
      const auto [it, is_new] = index_.emplace(entry.name, std::pair(f, e));
      if (!is_new) {
        return absl::DataLossError(
            fmt::format("tensor {} is in {} and in {}", entry.name, files_[it->second.first].path(), files_[f].path()));
      }
      bytes_ += entry.bytes;
    }
  }
  std::vector<std::string> lost, shards;
  int64_t moved = 0;
  for (const auto& [tensor, shard] : expected_) {
    const auto found = index_.find(tensor);
    if (found == index_.end()) {
      lost.push_back(tensor);
      if (std::find(shards.begin(), shards.end(), shard) == shards.end()) shards.push_back(shard);
    } else {
      moved += !files_[found->second.first].path().ends_with("/" + shard);
    }
  }
  if (!lost.empty()) {
    return NoModel(absl::StatusCode::kNotFound,
                   fmt::format("{}: {} names tensors of {} that are not there: {}. Download the missing shards again", path_,
                               kIndexName, FirstOf(shards), FirstOf(lost)));
  }
  if (moved > 0) notes_.push_back(fmt::format("{} names the wrong file for {} tensors", kIndexName, moved));
  return absl::OkStatus();
}

void ModelDirectory::NoteTypes() {
  static const std::map<std::string, std::string> kWords = {{"float32", "F32"}, {"bfloat16", "BF16"}, {"float16", "F16"}};
  std::map<std::string, int64_t> bytes;
  for (const SafetensorsFile& file : files_) {
    for (const SafetensorsEntry& entry : file.entries()) bytes[entry.dtype] += entry.bytes;
  }
  const Json tag = ModernForm(config_).value("dtype", Json());
  if (!tag.is_string() || bytes.empty()) return;
  const auto word = kWords.find(tag.get<std::string>());
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (word != kWords.end() && word->second != most->first && !config_.contains("quantization_config")) {
    notes_.push_back(
        fmt::format("config.json says {}, the tensors are {}: their own type counts", tag.get<std::string>(), most->first));
  }
}

ModelDirectory::Place ModelDirectory::Find(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) return {nullptr, nullptr};
  const SafetensorsFile& file = files_[found->second.first];
  return {&file, &file.entries()[found->second.second]};
}

std::string ModelDirectory::Fingerprint() const {
  std::string facts = config_text_;
  for (const SafetensorsFile& file : files_) {
    std::error_code error;
    const auto time = fs::last_write_time(file.path(), error).time_since_epoch().count();
    facts += fmt::format("{}:{}:{};", file.path(), fs::file_size(file.path(), error), time);
    for (const SafetensorsEntry& entry : file.entries()) facts += fmt::format("{},{},{};", entry.name, entry.dtype, entry.offset);
  }
  return fmt::format("{:016x}", XXH3_64bits(facts.data(), facts.size()));
}

}  // namespace mbridge
