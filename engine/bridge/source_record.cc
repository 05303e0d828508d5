#include "engine/bridge/source_record.h"

#include <filesystem>

#include <fmt/format.h>

#include "engine/bridge/config_form.h"
#include "engine/bridge/conversion.h"
#include "engine/core/file.h"

namespace mbridge {
namespace {

constexpr const char* kRecordName = "source.json";
constexpr int64_t kMaxFileBytes = int64_t{1} << 30;

absl::StatusOr<SourceRecord> ReadFolder(const std::string& folder) {
  SourceRecord record;
  MB_ASSIGN_OR_RETURN(record.config_text, ReadWholeFile(folder + "/config.json", kMaxFileBytes));
  MB_ASSIGN_OR_RETURN(record.config, ParseConfigJson(record.config_text, folder + "/config.json"));
  MB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(fmt::format("{}/{}", folder, kRecordName), kMaxFileBytes));
  MB_ASSIGN_OR_RETURN(const Json source, ParseConfigJson(text, folder + "/" + kRecordName));
  try {
    for (const Json& entry : source.at("tensors")) {
      record.tensors.push_back({entry.at("name"), entry.at("dtype"), entry.value("same_as", std::string())});
    }
    for (const Json& name : source.at("side_files")) {
      const std::string file = name;
      if (file.empty() || file.find('/') != std::string::npos) {
        return absl::DataLossError(fmt::format("{}/{} names the file \"{}\"", folder, kRecordName, file));
      }
      record.side_files.push_back(folder + "/" + file);
    }
  } catch (const Json::exception& error) {
    return absl::DataLossError(fmt::format("{}/{} is damaged: {}", folder, kRecordName, error.what()));
  }
  return record;
}

}  // namespace

absl::Status WriteSourceRecord(const std::string& directory, const ModelDirectory& model,
                               const std::vector<SourceRecord::Entry>& tensors) {
  const std::string folder = fmt::format("{}/{}", directory, kHuggingFaceFolder);
  MB_RETURN_IF_ERROR(RemoveAll(folder));
  MB_RETURN_IF_ERROR(MakeDirectories(folder));
  MB_RETURN_IF_ERROR(WriteFileDurably(folder + "/config.json", model.config_text()));
  for (const std::string& name : model.side_files()) {
    MB_ASSIGN_OR_RETURN(const std::string content, ReadWholeFile(model.path() + "/" + name, kMaxFileBytes));
    MB_RETURN_IF_ERROR(WriteFileDurably(folder + "/" + name, content));
  }
  Json listed = Json::array();
  for (const SourceRecord::Entry& entry : tensors) {
    Json item = {{"name", entry.name}, {"dtype", entry.dtype}};
    if (!entry.same_as.empty()) item["same_as"] = entry.same_as;
    listed.push_back(std::move(item));
  }
  const Json source = {{"format_version", 1}, {"side_files", model.side_files()}, {"tensors", std::move(listed)}};
  return WriteFileDurably(fmt::format("{}/{}", folder, kRecordName), source.dump(1, ' ', false, Json::error_handler_t::replace));
}

absl::StatusOr<SourceRecord> ReadSourceRecord(const std::string& directory, const AllowedRoots& roots) {
  const std::string folder = fmt::format("{}/{}", directory, kHuggingFaceFolder);
  std::error_code error;
  if (std::filesystem::exists(folder + "/" + kRecordName, error)) return ReadFolder(folder);
  MB_ASSIGN_OR_RETURN(const std::string found, FindModelDirectory(directory));
  MB_ASSIGN_OR_RETURN(const ModelDirectory model, ModelDirectory::Open(found, roots));
  SourceRecord record;
  record.config = model.config();
  record.config_text = model.config_text();
  for (const SafetensorsFile& file : model.files()) {
    for (const SafetensorsEntry& entry : file.entries()) record.tensors.push_back({entry.name, entry.dtype});
  }
  for (const std::string& name : model.side_files()) record.side_files.push_back(model.path() + "/" + name);
  return record;
}

}  // namespace mbridge
