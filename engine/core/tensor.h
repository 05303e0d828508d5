// A tensor is a view: pointer, element type, device and a row-major contiguous shape. It owns nothing; memory comes from an
// Arena or a buffer that outlives it. Copying a Tensor copies the view.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "engine/core/dtype.h"
#include "engine/core/error.h"

namespace mbridge {

enum class DeviceType : uint8_t { kCpu, kCuda };

class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    if (dims.size() > kMaxRank) ThrowEngineError("shape of rank {}, at most {}", dims.size(), kMaxRank);
    for (int64_t dim : dims) dims_[rank_++] = dim;
  }
  void Append(int64_t dim) {
    if (rank_ == kMaxRank) ThrowEngineError("shape of rank above {}", kMaxRank);
    dims_[rank_++] = dim;
  }
  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[axis]; }
  int64_t& operator[](int axis) { return dims_[axis]; }
  int64_t NumElements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  bool operator==(const Shape&) const = default;
  std::string ToString() const {
    std::string text = "[";
    for (int i = 0; i < rank_; ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims_[i]);
    return text + "]";
  }

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  Shape shape;

  int64_t size() const { return shape.NumElements(); }
  size_t bytes() const { return static_cast<size_t>(size()) * SizeOf(dtype); }
  bool empty() const { return data == nullptr; }

  // Typed pointer; throws when the type is another.
  template <class T> T* as() const {
    if (kDTypeOf<T> != dtype) ThrowEngineError("tensor is {}, read as {}", NameOf(dtype), NameOf(kDTypeOf<T>));
    return static_cast<T*>(data);
  }
  // Same elements, other shape.
  Tensor View(const Shape& other) const {
    if (other.NumElements() != size()) ThrowEngineError("view {} of {}", other.ToString(), shape.ToString());
    return {data, dtype, device, other};
  }
  // Rows [begin, begin + count) along axis 0.
  Tensor Rows(int64_t begin, int64_t count) const {
    const int64_t row = shape.rank() == 0 || shape[0] == 0 ? 0 : size() / shape[0];
    Shape part = shape;
    part[0] = count;
    return {static_cast<char*>(data) + static_cast<size_t>(begin * row) * SizeOf(dtype), dtype, device, part};
  }
};

}  // namespace mbridge
