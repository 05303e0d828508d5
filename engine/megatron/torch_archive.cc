#include "engine/megatron/torch_archive.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "engine/megatron/pickle_reader.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using Kind = PickleValue::Kind;

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kMaxPickleBytes = int64_t{512} << 20;
constexpr size_t kMaxRank = 16;

constexpr TorchType kTypes[] = {{"Float", 4, DType::kF32},
                                {"BFloat16", 2, DType::kBF16},
                                {"Half", 2, DType::kF16},
                                {"Double", 8, DType::kF64},
                                {"Long", 8, DType::kI64},
                                {"Int", 4, DType::kI32},
                                {"Byte", 1, DType::kU8},
                                {"Short", 2, std::nullopt},
                                {"Char", 1, std::nullopt},
                                {"Bool", 1, std::nullopt},
                                {"ComplexFloat", 8, std::nullopt},
                                {"ComplexDouble", 16, std::nullopt},
                                {"Float8_e4m3fn", 1, std::nullopt},
                                {"Float8_e5m2", 1, std::nullopt}};
// Names of torch.dtype, which newer files use in place of storages with a type.
const std::map<std::string, const char*> kStorageOfDtype = {{"float32", "Float"},
                                                            {"float", "Float"},
                                                            {"bfloat16", "BFloat16"},
                                                            {"float16", "Half"},
                                                            {"float64", "Double"},
                                                            {"int64", "Long"},
                                                            {"int32", "Int"},
                                                            {"uint8", "Byte"},
                                                            {"int16", "Short"},
                                                            {"int8", "Char"},
                                                            {"bool", "Bool"},
                                                            {"complex64", "ComplexFloat"},
                                                            {"float8_e4m3fn", "Float8_e4m3fn"},
                                                            {"float8_e5m2", "Float8_e5m2"}};

// A tuple of sizes.
bool ReadSizes(const PickleValue& value, std::vector<int64_t>* sizes) {
  if (!value.Is(Kind::kTuple) || value.items.size() > kMaxRank) return false;
  for (const PickleValue* item : value.items) {
    if (!item->Is(Kind::kInt) || item->integer < 0) return false;
    sizes->push_back(item->integer);
  }
  return true;
}

// Parameters, and tensors of subclasses, hold a tensor as the first of their arguments.
const PickleValue* Unwrap(const PickleValue* value) {
  for (int depth = 0; depth < 4; ++depth) {
    if (value->IsMadeBy("torch._utils _rebuild_parameter") || value->IsMadeBy("torch._utils _rebuild_parameter_with_state")) {
      if (value->arguments->items.empty()) return value;
      value = value->arguments->items[0];
    } else {
      break;
    }
  }
  return value;
}

}  // namespace

const TorchType* FindTorchType(const std::string& name) {
  for (const TorchType& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

absl::StatusOr<TorchType> TypeOfDtype(const std::string& global) {
  constexpr std::string_view kModule = "torch ";
  const auto known = global.starts_with(kModule) ? kStorageOfDtype.find(global.substr(kModule.size())) : kStorageOfDtype.end();
  if (known == kStorageOfDtype.end()) return absl::DataLossError(fmt::format("\"{}\" is no type of tensors", global));
  return *FindTorchType(known->second);
}

absl::Status TorchArchive::Broken(const std::string& what) const {
  return absl::DataLossError(fmt::format("{}: {}", path_, what));
}

absl::StatusOr<TorchArchive> TorchArchive::Open(const FileReader& file, int64_t begin, int64_t bytes) {
  TorchArchive archive;
  archive.path_ = file.path();
  char first = 0;
  if (bytes > 0 && begin >= 0 && begin < file.size()) MB_RETURN_IF_ERROR(file.ReadAt(begin, &first, 1));
  if (first == '\x80') {
    return MakeStatus(
        absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
        fmt::format("{} has the form of PyTorch before 1.6: load and save it once with a newer PyTorch", file.path()));
  }
  MB_ASSIGN_OR_RETURN(archive.entries_, ReadZipDirectory(file, begin, bytes));
  constexpr std::string_view kPickleName = "data.pkl";
  const auto pickled = std::find_if(archive.entries_.begin(), archive.entries_.end(), [&](const auto& entry) {
    const size_t slash = entry.first.find('/');
    return slash != std::string::npos && std::string_view(entry.first).substr(slash + 1) == kPickleName;
  });
  if (pickled == archive.entries_.end()) return archive.Broken("it is not a file of torch.save: there is no data.pkl in it");
  archive.folder_ = pickled->first.substr(0, pickled->first.size() - kPickleName.size());
  const auto order = archive.entries_.find(archive.folder_ + "byteorder");
  if (order != archive.entries_.end()) {
    std::string text(static_cast<size_t>(std::min<int64_t>(order->second.bytes, 16)), '\0');
    MB_RETURN_IF_ERROR(file.ReadAt(order->second.offset, text.data(), text.size()));
    if (text != "little") return archive.Broken(fmt::format("its numbers are stored {}-endian", text));
  }
  if (pickled->second.bytes > kMaxPickleBytes) return archive.Broken("its data.pkl is too large");
  std::string text(static_cast<size_t>(pickled->second.bytes), '\0');
  MB_RETURN_IF_ERROR(file.ReadAt(pickled->second.offset, text.data(), text.size()));
  MB_ASSIGN_OR_RETURN(archive.pickle_, ReadPickle(text, file.path()));
  return archive;
}

bool TorchArchive::IsTensor(const PickleValue& value) {
  const PickleValue* inner = Unwrap(&value);
  return inner->IsMadeBy("torch._utils _rebuild_tensor_v2") || inner->IsMadeBy("torch._utils _rebuild_tensor_v3");
}

absl::StatusOr<TorchTensor> TorchArchive::TensorOf(const PickleValue& value) const {
  const PickleValue* inner = Unwrap(&value);
  if (!IsTensor(*inner)) return Broken("a value is not a tensor");
  // storage, offset, size, stride, requires_grad, hooks[, dtype]
  const std::vector<const PickleValue*>& arguments = inner->arguments->items;
  if (arguments.size() < 4 || !arguments[0]->Is(Kind::kPersistent) || !arguments[1]->Is(Kind::kInt)) {
    return Broken("a tensor is not described rightly");
  }
  // "storage", class, key, device, number of elements
  const PickleValue& id = *arguments[0]->arguments;
  if (!id.Is(Kind::kTuple) || id.items.size() != 5 || !id.items[0]->Is(Kind::kText) || id.items[0]->text != "storage" ||
      !id.items[1]->Is(Kind::kGlobal) || !id.items[2]->Is(Kind::kText)) {
    return Broken("a storage is not described rightly");
  }
  TorchTensor tensor;
  constexpr std::string_view kModule = "torch ", kEnd = "Storage";
  const std::string& storage = id.items[1]->text;
  if (inner->IsMadeBy("torch._utils _rebuild_tensor_v3")) {
    if (arguments.size() < 7 || !arguments[6]->Is(Kind::kGlobal)) return Broken("a tensor has no type");
    MB_ASSIGN_OR_RETURN(const TorchType known, TypeOfDtype(arguments[6]->text));
    tensor.type = known.name;
  } else if (storage.starts_with(kModule) && storage.ends_with(kEnd)) {
    tensor.type = storage.substr(kModule.size(), storage.size() - kModule.size() - kEnd.size());
  }
  const TorchType* type = FindTorchType(tensor.type);
  if (type == nullptr) return Broken(fmt::format("a tensor has the unknown type {}", tensor.type));
  tensor.dtype = type->dtype;
  if (!ReadSizes(*arguments[2], &tensor.shape) || !ReadSizes(*arguments[3], &tensor.strides) ||
      tensor.shape.size() != tensor.strides.size()) {
    return Broken("a tensor has no proper shape");
  }
  const auto entry = entries_.find(fmt::format("{}data/{}", folder_, id.items[2]->text));
  if (entry == entries_.end()) return Broken(fmt::format("the storage {} of a tensor is missing", id.items[2]->text));
  // Last element.
  int64_t last = arguments[1]->integer, count = 1;
  bool fits = last >= 0;
  for (size_t axis = 0; axis < tensor.shape.size() && fits; ++axis) {
    int64_t step = 0;
    fits = !__builtin_mul_overflow(count, tensor.shape[axis], &count) &&
           !__builtin_mul_overflow(std::max<int64_t>(tensor.shape[axis] - 1, 0), tensor.strides[axis], &step) &&
           !__builtin_add_overflow(last, step, &last);
  }
  const int64_t elements = entry->second.bytes / type->bytes;
  if (!fits || (count > 0 && last >= elements)) return Broken("a tensor is larger than its storage");
  tensor.offset = entry->second.offset + (count > 0 ? arguments[1]->integer : 0) * type->bytes;
  return tensor;
}

}  // namespace mbridge
