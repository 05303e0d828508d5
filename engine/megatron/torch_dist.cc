// The layout torch_dist: .metadata lists the tensors, their blocks and where in the .distcp files these lie
// (torch.distributed.checkpoint.metadata of PyTorch).
#include <algorithm>

#include <fmt/format.h>

#include "engine/bridge/config_form.h"
#include "engine/megatron/pickle_reader.h"
#include "engine/megatron/stored_model.h"

namespace mbridge {
namespace {

using Kind = PickleValue::Kind;
using Sizes = std::vector<int64_t>;

constexpr int64_t kMaxMetadataBytes = int64_t{1} << 30;
constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata ";
constexpr const char* kCommonKey = "common_state/shard_0_1";

bool IsOfOptimizer(std::string_view key) {
  return key.starts_with("optimizer.") || key.starts_with("chained_") || key.find(".optimizer.") != std::string_view::npos;
}

class MetadataReader {
 public:
  explicit MetadataReader(StoredModel* model) : model_(*model), path_(model->path + "/.metadata") {}

  absl::Status Read() {
    MB_RETURN_IF_ERROR(CheckBackend());
    MB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path_, kMaxMetadataBytes));
    MB_ASSIGN_OR_RETURN(const Pickle pickle, ReadPickle(text, path_));
    const PickleValue* state = StateOf(*pickle.root, "Metadata");
    if (state == nullptr) return Broken("it holds no Metadata");
    const PickleValue* tensors = state->Find("state_dict_metadata");
    const PickleValue* places = state->Find("storage_data");
    if (tensors == nullptr || !tensors->Is(Kind::kDict) || places == nullptr || !places->Is(Kind::kDict))
      return Broken("it has no list of tensors or of places");
    for (size_t i = 0; i + 1 < places->items.size(); i += 2)
      MB_RETURN_IF_ERROR(ReadPlace(*places->items[i], *places->items[i + 1]));
    for (size_t i = 0; i + 1 < tensors->items.size(); i += 2) {
      if (!tensors->items[i]->Is(Kind::kText)) return Broken("a tensor has no name");
      MB_RETURN_IF_ERROR(ReadTensor(tensors->items[i]->text, *tensors->items[i + 1]));
    }
    return ReadCommon();
  }

 private:
  absl::Status Broken(std::string_view what) const { return BrokenCheckpoint(path_, what); }

  absl::Status CheckBackend() const {
    const std::string path = model_.path + "/metadata.json";
    MB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, 1 << 20));
    MB_ASSIGN_OR_RETURN(const Json json, ParseConfigJson(text, path));
    const Json backend = json.value("sharded_backend", Json());
    if (backend == "torch_dist") return absl::OkStatus();
    return UnsupportedCheckpoint(
        path, fmt::format("sharded_backend is {}: read is torch_dist; Megatron-LM itself loads and saves it so", backend.dump()));
  }

  // The attributes of an object of one of torch's classes.
  static const PickleValue* StateOf(const PickleValue& value, std::string_view name) {
    if (!value.Is(Kind::kObject) || value.callee->text != fmt::format("{}{}", kModule, name)) return nullptr;
    return value.state != nullptr && value.state->Is(Kind::kDict) ? value.state : nullptr;
  }
  static bool ReadSize(const PickleValue* value, Sizes* sizes) {
    constexpr size_t kMaxRank = 16;
    if (value == nullptr || !value->IsMadeBy("torch Size") || value->arguments->items.size() != 1) return false;
    const PickleValue& items = *value->arguments->items[0];
    if (!items.IsSequence() || items.items.size() > kMaxRank) return false;
    for (const PickleValue* item : items.items) {
      if (!item->Is(Kind::kInt) || item->integer < 0) return false;
      sizes->push_back(item->integer);
    }
    return true;
  }

  absl::Status ReadPlace(const PickleValue& index, const PickleValue& info) {
    const PickleValue* key = StateOf(index, "MetadataIndex");
    const PickleValue* name = key == nullptr ? nullptr : key->Find("fqn");
    if (name == nullptr || !name->Is(Kind::kText)) return Broken("a place has no name");
    Sizes offset;
    if (const PickleValue* value = key->Find("offset"); value != nullptr && !value->Is(Kind::kNone) && !ReadSize(value, &offset))
      return Broken(fmt::format("the place of {} is not described rightly", name->text));
    const PickleValue* state = info.Is(Kind::kObject) ? info.state : nullptr;
    const PickleValue* file = state == nullptr ? nullptr : state->Find("relative_path");
    StoredPiece piece;
    if (file == nullptr || !file->Is(Kind::kText)) return Broken(fmt::format("the place of {} names no file", name->text));
    piece.file = file->text;
    if (piece.file.empty() || piece.file.find('/') != std::string::npos || piece.file == ".." ||
        piece.file.find('\0') != std::string::npos)
      return Broken(fmt::format("the place of {} names the file \"{}\"", name->text, piece.file));
    if (const PickleValue* transforms = state->Find("transform_descriptors");
        transforms != nullptr && !transforms->Is(Kind::kNone))
      return UnsupportedCheckpoint(path_, fmt::format("{} is stored compressed or otherwise transformed", name->text));
    piece.offset = IntArgument(*state, "offset", -1);
    piece.bytes = IntArgument(*state, "length", -1);
    if (piece.offset < 0 || piece.bytes < 0) return Broken(fmt::format("the place of {} has no offset or length", name->text));
    places_[{name->text, std::move(offset)}] = std::move(piece);
    return absl::OkStatus();
  }

  absl::Status ReadTensor(const std::string& key, const PickleValue& value) {
    const PickleValue* state = StateOf(value, "TensorStorageMetadata");
    if (state == nullptr) {
      if (!value.IsMadeBy(fmt::format("{}BytesStorageMetadata", kModule)))
        return Broken(fmt::format("{} is of an unknown kind", key));
      ++model_.other_objects;
      return absl::OkStatus();
    }
    StoredTensor tensor;
    const PickleValue* properties = state->Find("properties");
    const PickleValue* values = properties != nullptr && properties->Is(Kind::kObject) ? properties->state : nullptr;
    const PickleValue* dtype = values == nullptr                                    ? nullptr
                               : values->Is(Kind::kTuple) && !values->items.empty() ? values->items[0]
                                                                                    : values->Find("dtype");
    if (dtype == nullptr || !dtype->Is(Kind::kGlobal)) return Broken(fmt::format("tensor {} has no type", key));
    MB_ASSIGN_OR_RETURN(const TorchType type, TypeOfDtype(dtype->text));
    tensor.type = type.name;
    tensor.dtype = type.dtype;
    if (!ReadSize(state->Find("size"), &tensor.shape)) return Broken(fmt::format("tensor {} has no shape", key));
    int64_t bytes = type.bytes;
    for (const int64_t size : tensor.shape) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) return Broken(fmt::format("tensor {} is too large", key));
    }
    if (IsOfOptimizer(key)) {
      ++model_.optimizer_tensors;
      model_.optimizer_bytes += bytes;
      return absl::OkStatus();
    }
    const PickleValue* chunks = state->Find("chunks");
    if (chunks == nullptr || !chunks->Is(Kind::kList)) return Broken(fmt::format("tensor {} has no list of parts", key));
    for (const PickleValue* chunk : chunks->items) MB_RETURN_IF_ERROR(ReadChunk(key, *chunk, &tensor));
    model_.tensors[key] = std::move(tensor);
    return absl::OkStatus();
  }

  absl::Status ReadChunk(const std::string& key, const PickleValue& value, StoredTensor* tensor) {
    const PickleValue* state = StateOf(value, "ChunkStorageMetadata");
    Sizes begin, size;
    if (state == nullptr || !ReadSize(state->Find("offsets"), &begin) || !ReadSize(state->Find("sizes"), &size) ||
        begin.size() != tensor->shape.size() || size.size() != tensor->shape.size()) {
      return Broken(fmt::format("a part of tensor {} is not described rightly", key));
    }
    for (size_t axis = 0; axis < size.size(); ++axis) {
      if (begin[axis] > tensor->shape[axis] || size[axis] > tensor->shape[axis] - begin[axis])
        return Broken(fmt::format("a part of tensor {} is not within it", key));
    }
    const auto place = places_.find({key, begin});
    if (place == places_.end()) return Broken(fmt::format("a part of tensor {} is in no file", key));
    StoredPiece piece = place->second;
    piece.begin = std::move(begin);
    piece.size = std::move(size);
    tensor->pieces.push_back(std::move(piece));
    return absl::OkStatus();
  }

  // The run's arguments: in common.pt, newer files have them as an object among the data.
  absl::Status ReadCommon() {
    absl::StatusOr<const FileReader*> file = model_.files->Open("common.pt");
    int64_t offset = 0, bytes = file.ok() ? (*file)->size() : 0;
    const auto place = places_.find({kCommonKey, {}});
    if (absl::IsNotFound(file.status()) && place != places_.end()) {
      file = model_.files->Open(place->second.file);
      offset = place->second.offset;
      bytes = place->second.bytes;
    }
    if (absl::IsNotFound(file.status())) return absl::OkStatus();
    MB_RETURN_IF_ERROR(file.status());
    MB_ASSIGN_OR_RETURN(TorchArchive archive, TorchArchive::Open(**file, offset, bytes));
    model_.common = std::move(archive).TakePickle();
    const PickleValue* root = model_.common.root;
    if (root->Is(Kind::kList) && root->items.size() == 1) root = root->items[0];
    model_.arguments = ArgumentsOf(*root);
    return absl::OkStatus();
  }

  StoredModel& model_;
  std::string path_;
  std::map<std::pair<std::string, Sizes>, StoredPiece> places_;
};

}  // namespace

absl::Status ReadTorchDist(StoredModel* model) {
  model->format = "torch_dist";
  return MetadataReader(model).Read();
}

}  // namespace mbridge
