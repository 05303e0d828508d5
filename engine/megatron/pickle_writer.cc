#include "engine/megatron/pickle_writer.h"

#include <bit>

namespace mbridge {

PickleWriter& PickleWriter::Number(uint64_t value, int width) {
  for (int i = 0; i < width; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  return *this;
}

PickleWriter& PickleWriter::Int(int64_t value) {
  if (value == static_cast<int32_t>(value)) return Op('J').Number(static_cast<uint64_t>(value), 4);
  return Op('\x8a').Op(8).Number(static_cast<uint64_t>(value), 8);
}

PickleWriter& PickleWriter::Float(double value) { return Op('G').Number(__builtin_bswap64(std::bit_cast<uint64_t>(value)), 8); }

PickleWriter& PickleWriter::Text(std::string_view utf8) {
  Op('X').Number(utf8.size(), 4);
  bytes_ += utf8;
  return *this;
}

PickleWriter& PickleWriter::Global(std::string_view module, std::string_view name) {
  Op('c');
  bytes_ += module;
  Op('\n');
  bytes_ += name;
  return Op('\n');
}

std::string PickleWriter::Finish() {
  Op('.');
  return std::move(bytes_);
}

}  // namespace mbridge
