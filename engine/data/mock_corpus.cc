#include "engine/data/mock_corpus.h"

#include "engine/core/numpy_random.h"

namespace mbridge {

constexpr int64_t kMockDocuments = 100000;

MockCorpus::MockCorpus(int64_t vocab_size, int64_t eod_id)
    : vocab_size_(static_cast<int32_t>(vocab_size)), eod_id_(static_cast<int32_t>(eod_id)), lengths_(kMockDocuments) {
  NumpyGenerator generator(0);
  for (int32_t& length : lengths_) length = generator.Integer(1, 4096);
  SetLengths(lengths_.data(), kMockDocuments);
}

void MockCorpus::Read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const {
  int32_t token = static_cast<int32_t>((offset + 1) % vocab_size_);
  for (int64_t j = 0; j < count; ++j) {
    out[j] = token;
    if (++token == vocab_size_) token = 0;
  }
  if (count > 0 && offset + count == length(sequence)) out[count - 1] = eod_id_;
}

const std::string& MockCorpus::name() const {
  static const std::string kName = "mock data";
  return kName;
}

}  // namespace mbridge
