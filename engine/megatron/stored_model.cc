#include "engine/megatron/stored_model.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/element_type.h"

namespace mbridge {
namespace {

namespace fs = std::filesystem;

using Kind = PickleValue::Kind;
using Sizes = std::vector<int64_t>;

std::string ShapeText(const Sizes& shape) { return fmt::format("[{}]", absl::StrJoin(shape, ", ")); }

Sizes SizesOf(const Shape& shape) {
  Sizes sizes;
  for (int axis = 0; axis < shape.rank(); ++axis) sizes.push_back(shape[axis]);
  return sizes;
}

int64_t Product(const Sizes& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

absl::Status Misshapen(const std::string& key, const Sizes& found, const std::string& wanted) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
                    fmt::format("tensor {} has shape {}, the model has {}", key, ShapeText(found), wanted));
}

bool Overlap(const SourceBlock& a, const SourceBlock& b) {
  for (size_t axis = 0; axis < a.at.size(); ++axis) {
    if (a.at[axis] + a.size[axis] <= b.at[axis] || b.at[axis] + b.size[axis] <= a.at[axis]) return false;
  }
  return true;
}

// Rows [first_row, first_row + half_rows) of a parameter (half_rows = 0: all of it), from a tensor whose blocks
// make the whole.
absl::Status AddWhole(const std::string& key, const StoredTensor& tensor, const std::vector<LeadingIndex>& lead,
                      const Sizes& shape, int64_t half_rows, int64_t first_row, ParameterSource* source) {
  Sizes wanted;
  for (const LeadingIndex& index : lead) wanted.push_back(index.count);
  wanted.insert(wanted.end(), shape.begin(), shape.end());
  if (half_rows > 0) wanted[lead.size()] = half_rows;
  if (tensor.shape != wanted) return Misshapen(key, tensor.shape, ShapeText(wanted));
  int64_t covered = 0, missing = Product(wanted);
  const size_t leading = lead.size(), others = source->blocks.size();
  for (const LeadingIndex& index : lead) missing /= std::max<int64_t>(index.count, 1);
  for (const StoredPiece& piece : tensor.pieces) {
    SourceBlock block{.piece = &piece, .at = {}, .size = {}, .from = {}};
    bool inside = true;
    for (size_t axis = 0; axis < leading; ++axis) {
      const int64_t from = lead[axis].index - piece.begin[axis];
      inside &= from >= 0 && from < piece.size[axis];
      block.from.push_back(from);
    }
    if (!inside) continue;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      block.at.push_back(piece.begin[leading + axis] + (axis == 0 ? first_row : 0));
      block.size.push_back(piece.size[leading + axis]);
      block.from.push_back(0);
    }
    for (size_t other = others; other < source->blocks.size(); ++other) {
      if (Overlap(source->blocks[other], block)) return absl::DataLossError(fmt::format("parts of tensor {} overlap", key));
    }
    covered += Product(block.size);
    source->blocks.push_back(std::move(block));
  }
  if (covered != missing) return absl::DataLossError(fmt::format("parts of tensor {} are missing", key));
  return absl::OkStatus();
}

// A parameter from the shards of the tensor-parallel ranks: the axis is the one along which they make the whole. Rows of the
// first gated layer are split in two stripes: each rank has its part of the gate and of the linear half.
absl::Status AddShards(const std::string& key, const StoredTensor& tensor, const Sizes& shape, int64_t ranks, bool halves,
                       ParameterSource* source) {
  const auto copies = [&] {
    source->blocks.push_back({&tensor.pieces[0], Sizes(shape.size(), 0), shape, Sizes(shape.size(), 0)});
  };
  const Sizes& shard = tensor.shape;
  if (shard == shape) {
    copies();
    return absl::OkStatus();
  }
  int split = -1;
  for (size_t axis = 0; axis < shape.size() && shard.size() == shape.size(); ++axis) {
    if (shard[axis] == shape[axis]) continue;
    if (split >= 0 || shard[axis] * ranks != shape[axis])
      return Misshapen(key, shard, fmt::format("{} in {} shards", ShapeText(shape), ranks));
    split = static_cast<int>(axis);
  }
  if (split < 0 || static_cast<int64_t>(tensor.pieces.size()) != ranks)
    return Misshapen(key, shard, fmt::format("{} in {} shards", ShapeText(shape), ranks));
  const int64_t stripes = halves && split == 0 ? 2 : 1, part = shard[split] / stripes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
      SourceBlock block{&tensor.pieces[rank], Sizes(shape.size(), 0), shard, Sizes(shape.size(), 0)};
      block.size[split] = part;
      block.at[split] = (stripe * ranks + rank) * part;
      block.from[split] = stripe * part;
      source->blocks.push_back(std::move(block));
    }
  }
  return absl::OkStatus();
}

// Copies a block of `elements` between two strided arrays of `width` bytes an element.
void CopyStrided(const Sizes& size, size_t axis, const char* from, const Sizes& from_strides, char* into,
                 const Sizes& into_strides, size_t width) {
  if (axis == size.size()) {
    std::memcpy(into, from, width);
    return;
  }
  if (axis + 1 == size.size() && from_strides[axis] == 1 && into_strides[axis] == 1) {
    std::memcpy(into, from, static_cast<size_t>(size[axis]) * width);
    return;
  }
  for (int64_t i = 0; i < size[axis]; ++i) {
    CopyStrided(size, axis + 1, from + i * from_strides[axis] * static_cast<int64_t>(width), from_strides,
                into + i * into_strides[axis] * static_cast<int64_t>(width), into_strides, width);
  }
}

Sizes RowMajor(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  return strides;
}

// Whether the block lies in an array with these strides without gaps.
bool IsDense(const Sizes& size, const Sizes& strides) {
  int64_t expected = 1;
  for (size_t axis = size.size(); axis-- > 0;) {
    if (size[axis] != 1 && strides[axis] != expected) return false;
    expected *= size[axis];
  }
  return true;
}

}  // namespace

absl::Status BrokenCheckpoint(const std::string& path, std::string_view what) {
  return MakeStatus(absl::StatusCode::kDataLoss, v1::REASON_CHECKPOINT_CORRUPT, fmt::format("{}: {}", path, what));
}

absl::Status UnsupportedCheckpoint(const std::string& path, std::string_view what) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL, fmt::format("{}: {}", path, what));
}

absl::StatusOr<const FileReader*> CheckpointFiles::Open(const std::string& name) {
  constexpr size_t kMostOpen = 64;
  auto found = open_.find(name);
  if (found == open_.end()) {
    if (open_.size() >= kMostOpen) open_.clear();
    MB_ASSIGN_OR_RETURN(FileReader reader, FileReader::Open(fmt::format("{}/{}", directory_, name)));
    found = open_.emplace(name, std::make_unique<FileReader>(std::move(reader))).first;
  }
  return found->second.get();
}

int64_t StoredTensor::bytes() const {
  return Product(shape) * FindTorchType(type)->bytes * (split ? static_cast<int64_t>(pieces.size()) : 1);
}

absl::StatusOr<ParameterSource> StoredModel::Find(const std::string& ours, const Shape& shape, const GptConfig& config) const {
  const Sizes sizes = SizesOf(shape);
  for (const StoredForm& form : StoredForms(ours, config.num_layers, config.num_moe_experts)) {
    const bool all = std::all_of(form.begin(), form.end(), [&](const StoredPart& part) { return tensors.contains(part.key); });
    if (!all) continue;
    ParameterSource source;
    std::optional<DType> dtype;
    for (size_t i = 0; i < form.size(); ++i) {
      const StoredTensor& tensor = tensors.at(form[i].key);
      source.keys.push_back(form[i].key);
      dtype = i == 0 ? tensor.dtype : (dtype && tensor.dtype ? WiderType(*dtype, *tensor.dtype) : std::nullopt);
      if (!dtype)
        return UnsupportedCheckpoint(form[i].key, fmt::format("is a tensor of type {}, which no parameter has", tensor.type));
      if (tensor.split) {
        const bool halves = ours.find("linear_fc1.") != std::string::npos && IsGated(config.activation);
        MB_RETURN_IF_ERROR(AddShards(form[i].key, tensor, sizes, static_cast<int64_t>(tensor.pieces.size()), halves, &source));
      } else {
        const int64_t half = form.size() == 2 ? sizes[0] / 2 : 0;
        MB_RETURN_IF_ERROR(AddWhole(form[i].key, tensor, form[i].lead, sizes, half, static_cast<int64_t>(i) * half, &source));
      }
    }
    source.dtype = *dtype;
    return source;
  }
  return absl::NotFoundError(fmt::format("there is no tensor for {}", ours));
}

absl::Status StoredModel::Read(const ParameterSource& source, const Shape& shape, DType dtype, void* into) const {
  const Sizes sizes = SizesOf(shape), into_strides = RowMajor(sizes);
  const auto width = static_cast<int64_t>(SizeOf(dtype));
  ByteBuffer stored, converted;
  for (const SourceBlock& block : source.blocks) {
    MB_ASSIGN_OR_RETURN(const FileReader* file, files->Open(block.piece->file));
    TorchTensor place;
    if (block.piece->place) {
      place = *block.piece->place;
    } else {
      MB_ASSIGN_OR_RETURN(const TorchArchive archive, TorchArchive::Open(*file, block.piece->offset, block.piece->bytes));
      MB_ASSIGN_OR_RETURN(place, archive.TensorOf(archive.root()));
      if (place.shape != block.piece->size) {
        return BrokenCheckpoint(file->path(), fmt::format("a part of {} has shape {} in the file and {} in .metadata",
                                                          source.keys[0], ShapeText(place.shape), ShapeText(block.piece->size)));
      }
    }
    if (!place.dtype)
      return UnsupportedCheckpoint(file->path(), fmt::format("a part of {} has type {}", source.keys[0], place.type));
    // The stretch of the file from the block's first element to its last.
    const size_t leading = place.shape.size() - sizes.size();
    const auto from_width = static_cast<int64_t>(SizeOf(*place.dtype));
    const Sizes strides(place.strides.begin() + static_cast<std::ptrdiff_t>(leading), place.strides.end());
    int64_t first = 0, span = 1, target = 0;
    for (size_t axis = 0; axis < place.shape.size(); ++axis) first += block.from[axis] * place.strides[axis];
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      span += (block.size[axis] - 1) * strides[axis];
      target += block.at[axis] * into_strides[axis];
    }
    if (Product(block.size) == 0) continue;
    char* const place_in = static_cast<char*>(into) + target * width;
    const int64_t offset = place.offset + first * from_width;
    const bool dense = IsDense(block.size, strides) && IsDense(block.size, into_strides);
    if (dense && *place.dtype == dtype) {
      MB_RETURN_IF_ERROR(file->ReadAt(offset, place_in, static_cast<size_t>(span * width)));
      continue;
    }
    MB_RETURN_IF_ERROR(stored.Resize(span * from_width));
    MB_RETURN_IF_ERROR(file->ReadAt(offset, stored.data(), static_cast<size_t>(span * from_width)));
    const char* data = stored.data();
    if (*place.dtype != dtype) {
      MB_RETURN_IF_ERROR(converted.Resize(span * width));
      if (!ConvertElements(NameOf(*place.dtype), stored.data(), dtype, converted.data(), span)) {
        return UnsupportedCheckpoint(source.keys[0], fmt::format("is {} and cannot become {}", place.type, NameOf(dtype)));
      }
      data = converted.data();
    }
    CopyStrided(block.size, 0, data, strides, place_in, into_strides, static_cast<size_t>(width));
  }
  return absl::OkStatus();
}

const PickleValue* ArgumentsOf(const PickleValue& common) {
  const PickleValue* arguments = common.Find("args");
  if (arguments == nullptr) return nullptr;
  if (arguments->Is(Kind::kObject) && arguments->state != nullptr) arguments = arguments->state;
  return arguments->Is(Kind::kDict) ? arguments : nullptr;
}

int64_t IntArgument(const PickleValue& arguments, std::string_view name, int64_t missing) {
  const PickleValue* value = arguments.Find(name);
  return value != nullptr && value->Is(Kind::kInt) ? value->integer : missing;
}

absl::StatusOr<StoredModel> OpenStoredModel(const std::string& directory, const AllowedRoots& roots) {
  StoredModel model;
  model.path = directory;
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_REQUEST,
                      fmt::format("{} is not a directory of the node: give the folder with {}, or one of its iter_ folders",
                                  directory, kTrackerName));
  }
  MB_RETURN_IF_ERROR(CheckRoots(directory, roots));  // Before anything in it is read.
  if (fs::exists(fmt::format("{}/{}", directory, kTrackerName), error)) {
    MB_ASSIGN_OR_RETURN(std::string text, ReadWholeFile(fmt::format("{}/{}", directory, kTrackerName), 64));
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '\r')) text.pop_back();
    const bool number =
        !text.empty() && text.size() < 16 && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!number && text != "release") return BrokenCheckpoint(directory, fmt::format("{} says \"{}\"", kTrackerName, text));
    model.path = number ? fmt::format("{}/iter_{:07}", directory, std::stoll(text)) : directory + "/release";
    if (!fs::is_directory(model.path, error)) {
      return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_REQUEST,
                        fmt::format("{} says {}, but there is no folder {}", kTrackerName, text, model.path));
    }
  }
  MB_RETURN_IF_ERROR(CheckRoots(model.path, roots));
  model.iteration = fs::path(model.path).filename().string();
  if (model.iteration.starts_with("iter_")) model.iteration = std::to_string(std::atoll(model.iteration.c_str() + 5));
  model.files = std::make_shared<CheckpointFiles>(model.path);
  std::vector<std::string> names;
  for (fs::directory_iterator entry(model.path, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
    if (!entry->is_directory(error)) MB_RETURN_IF_ERROR(CheckRoots(entry->path().string(), roots));
  }
  if (error) return FileError(error.value(), "list", model.path);
  const auto has = [&](std::string_view name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  const bool ranks =
      std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("mp_rank_"); });
  if (has("metadata.json")) {
    MB_RETURN_IF_ERROR(ReadTorchDist(&model));
  } else if (ranks) {
    MB_RETURN_IF_ERROR(ReadRankFiles(roots, &model));
  } else if (has(".metadata")) {
    return UnsupportedCheckpoint(
        model.path,
        "there is no metadata.json: the save did not end, or it has the format torch_dcp or fsdp_dtensor; read "
        "are torch_dist and torch");
  } else {
    return MakeStatus(
        absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_REQUEST,
        fmt::format("{} is no checkpoint of Megatron-LM: it has neither metadata.json (torch_dist) nor mp_rank_ folders (torch)",
                    model.path));
  }
  return model;
}

}  // namespace mbridge
