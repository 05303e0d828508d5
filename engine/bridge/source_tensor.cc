#include "engine/bridge/source_tensor.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "engine/bridge/element_type.h"

namespace mbridge {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;

absl::Status Misfit(const std::string& name, const std::string& what) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL, fmt::format("tensor {} {}", name, what));
}

int64_t Product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Bytes [begin, begin + bytes) of an entry.
absl::Status ReadBytes(const ModelDirectory::Place& place, int64_t begin, int64_t bytes, void* into) {
  SafetensorsEntry part = *place.entry;
  part.offset += begin;
  part.bytes = bytes;
  return place.file->Read(part, into);
}

class PlainTensor : public SourceTensor {
 public:
  PlainTensor(const ModelDirectory::Place& place, DType type) : place_(place) {
    shape_ = place.entry->shape;
    type_ = type;
    stored_dtype_ = place.entry->dtype;
    stored_bytes_ = place.entry->bytes;
  }

  absl::Status Read(int64_t begin, int64_t count, DType to, void* into) override {
    const int64_t width = SafetensorsElementBytes(stored_dtype_);
    if (stored_dtype_ == NameOf(to)) return ReadBytes(place_, begin * width, count * width, into);
    buffer_.resize(static_cast<size_t>(std::min(kChunkBytes, count * width)));
    for (int64_t done = 0; done < count;) {
      const int64_t part = std::min(count - done, kChunkBytes / width);
      MB_RETURN_IF_ERROR(ReadBytes(place_, (begin + done) * width, part * width, buffer_.data()));
      if (!ConvertElements(stored_dtype_, buffer_.data(), to, static_cast<char*>(into) + done * static_cast<int64_t>(SizeOf(to)),
                           part)) {
        return Misfit(place_.entry->name, fmt::format("is {} and cannot become {}", stored_dtype_, NameOf(to)));
      }
      done += part;
    }
    return absl::OkStatus();
  }

 private:
  ModelDirectory::Place place_;
  std::vector<char> buffer_;
};

// Values times the scale of their block of block_rows x block_columns.
class BlockFp8Tensor : public SourceTensor {
 public:
  static absl::StatusOr<std::unique_ptr<SourceTensor>> Make(const ModelDirectory& directory, const ModelDirectory::Place& place,
                                                            const ModelDirectory::Place& scales) {
    auto tensor = std::make_unique<BlockFp8Tensor>();
    const std::string& name = place.entry->name;
    tensor->place_ = place;
    tensor->shape_ = place.entry->shape;
    tensor->type_ = DType::kBF16;
    tensor->stored_dtype_ = place.entry->dtype;
    tensor->quantised_ = true;
    tensor->stored_bytes_ = place.entry->bytes + scales.entry->bytes;
    const Json block = directory.config().value("quantization_config", Json::object()).value("weight_block_size", Json());
    if (block.is_array() && block.size() == 2 && block[0].is_number_integer() && block[1].is_number_integer()) {
      tensor->block_rows_ = block[0];
      tensor->block_columns_ = block[1];
    }
    const std::vector<int64_t>& shape = tensor->shape_;
    if (shape.size() != 2 || scales.entry->shape.size() != 2 || tensor->block_rows_ < 1 || tensor->block_columns_ < 1) {
      return Misfit(name, "with scales must be a matrix, and weight_block_size a pair of sizes");
    }
    const int64_t rows = (shape[0] + tensor->block_rows_ - 1) / tensor->block_rows_;
    tensor->scale_columns_ = (shape[1] + tensor->block_columns_ - 1) / tensor->block_columns_;
    if (scales.entry->shape != std::vector<int64_t>{rows, tensor->scale_columns_}) {
      return Misfit(name, fmt::format("of {}x{} needs {}x{} scales for blocks of {}x{}, {} has {}x{}", shape[0], shape[1], rows,
                                      tensor->scale_columns_, tensor->block_rows_, tensor->block_columns_, scales.entry->name,
                                      scales.entry->shape[0], scales.entry->shape[1]));
    }
    std::vector<char> raw(static_cast<size_t>(scales.entry->bytes));
    MB_RETURN_IF_ERROR(scales.file->Read(*scales.entry, raw.data()));
    tensor->scales_.resize(static_cast<size_t>(scales.entry->NumElements()));
    if (scales.entry->dtype == "F8_E8M0") {
      for (size_t i = 0; i < raw.size(); ++i) tensor->scales_[i] = FromE8M0(static_cast<uint8_t>(raw[i]));
    } else if (!ConvertElements(scales.entry->dtype, raw.data(), DType::kF32, tensor->scales_.data(),
                                scales.entry->NumElements())) {
      return Misfit(scales.entry->name, fmt::format("has dtype {}", scales.entry->dtype));
    }
    return std::unique_ptr<SourceTensor>(std::move(tensor));
  }

  absl::Status Read(int64_t begin, int64_t count, DType to, void* into) override {
    const int64_t columns = shape_[1];
    raw_.resize(static_cast<size_t>(std::min(kChunkBytes, count)));
    values_.resize(raw_.size());
    for (int64_t done = 0; done < count;) {
      const int64_t part = std::min(count - done, kChunkBytes);
      MB_RETURN_IF_ERROR(ReadBytes(place_, begin + done, part, raw_.data()));
      ConvertElements(stored_dtype_, raw_.data(), DType::kF32, values_.data(), part);
      for (int64_t i = 0; i < part; ++i) {
        const int64_t row = (begin + done + i) / columns, column = (begin + done + i) % columns;
        values_[i] *= scales_[row / block_rows_ * scale_columns_ + column / block_columns_];
      }
      ConvertElements("F32", values_.data(), to, static_cast<char*>(into) + done * static_cast<int64_t>(SizeOf(to)), part);
      done += part;
    }
    return absl::OkStatus();
  }

 private:
  ModelDirectory::Place place_;
  int64_t block_rows_ = 128, block_columns_ = 128, scale_columns_ = 0;
  std::vector<float> scales_, values_;
  std::vector<uint8_t> raw_;
};

// blocks [experts, rows, groups, 16] of two 4-bit values a byte (low half first), scales [experts, rows, groups] as powers of
// two. The tensor is [experts, 32 * groups, rows]: transposed.
class Mxfp4Tensor : public SourceTensor {
 public:
  static absl::StatusOr<std::unique_ptr<SourceTensor>> Make(const std::string& name, const ModelDirectory::Place& blocks,
                                                            const ModelDirectory::Place& scales) {
    const std::vector<int64_t>&b = blocks.entry->shape, &s = scales.entry->shape;
    if (b.size() != 4 || b[3] != 16 || s != std::vector<int64_t>(b.begin(), b.end() - 1) || blocks.entry->dtype != "U8" ||
        (scales.entry->dtype != "U8" && scales.entry->dtype != "F8_E8M0")) {
      return Misfit(name, "as MXFP4 needs U8 blocks [experts, rows, groups, 16] and scales [experts, rows, groups]");
    }
    auto tensor = std::make_unique<Mxfp4Tensor>();
    tensor->blocks_ = blocks;
    tensor->scales_ = scales;
    tensor->shape_ = {b[0], b[2] * 32, b[1]};
    tensor->type_ = DType::kBF16;
    tensor->stored_dtype_ = "U8";
    tensor->quantised_ = true;
    tensor->stored_bytes_ = blocks.entry->bytes + scales.entry->bytes;
    return std::unique_ptr<SourceTensor>(std::move(tensor));
  }

  // Expert by expert; a part of one is made whole first.
  absl::Status Read(int64_t begin, int64_t count, DType to, void* into) override {
    const int64_t expert_size = shape_[1] * shape_[2];
    for (int64_t done = 0; done < count;) {
      const int64_t expert = (begin + done) / expert_size, at = (begin + done) % expert_size;
      const int64_t part = std::min(count - done, expert_size - at);
      MB_RETURN_IF_ERROR(MakeExpert(expert));
      ConvertElements("BF16", values_.data() + at, to, static_cast<char*>(into) + done * static_cast<int64_t>(SizeOf(to)), part);
      done += part;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status MakeExpert(int64_t expert) {
    if (expert == expert_) return absl::OkStatus();
    static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const int64_t rows = shape_[2], inputs = shape_[1], groups = inputs / 32;
    std::vector<uint8_t> blocks(static_cast<size_t>(rows * groups * 16)), scales(static_cast<size_t>(rows * groups));
    MB_RETURN_IF_ERROR(ReadBytes(blocks_, expert * rows * groups * 16, rows * groups * 16, blocks.data()));
    MB_RETURN_IF_ERROR(ReadBytes(scales_, expert * rows * groups, rows * groups, scales.data()));
    values_.resize(static_cast<size_t>(rows * inputs));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < inputs / 2; ++i) {
        const uint8_t pair = blocks[row * (inputs / 2) + i];
        const float scale = FromE8M0(scales[row * groups + i / 16]);
        values_[(2 * i) * rows + row] = ToBFloat16(kValues[pair & 15] * scale);
        values_[(2 * i + 1) * rows + row] = ToBFloat16(kValues[pair >> 4] * scale);
      }
    }
    expert_ = expert;
    return absl::OkStatus();
  }

  ModelDirectory::Place blocks_{}, scales_{};
  int64_t expert_ = -1;  // Whose values are there.
  std::vector<BFloat16> values_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SourceTensor>> SourceTensor::Open(const ModelDirectory& directory, const std::string& name) {
  const ModelDirectory::Place place = directory.Find(name);
  if (place.entry == nullptr) {
    const ModelDirectory::Place blocks = directory.Find(name + "_blocks"), scales = directory.Find(name + "_scales");
    if (blocks.entry != nullptr && scales.entry != nullptr) return Mxfp4Tensor::Make(name, blocks, scales);
    return absl::NotFoundError(fmt::format("{} has no tensor {}", directory.path(), name));
  }
  const bool eight_bits = place.entry->dtype.starts_with("F8_");
  if (const ModelDirectory::Place scales = directory.Find(name + "_scale_inv"); scales.entry != nullptr && eight_bits) {
    return BlockFp8Tensor::Make(directory, place, scales);
  }
  const std::optional<DType> type = ExactType(place.entry->dtype);
  if (!type) return Misfit(name, fmt::format("has dtype {}, which no parameter has", place.entry->dtype));
  if (Product(place.entry->shape) == 0) return Misfit(name, "is empty");
  return std::make_unique<PlainTensor>(place, *type);
}

std::string QuantisedOwner(const std::string& name) {
  for (const std::string_view end : {"_scale_inv", "_blocks", "_scales"}) {
    if (name.ends_with(end)) return name.substr(0, name.size() - end.size());
  }
  return "";
}

}  // namespace mbridge
