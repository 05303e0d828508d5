// Megatron-LM's mock corpus (MockGPTLowLevelDataset in gpt_dataset.py): 100,000 documents, no token stored.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/data/token_source.h"

namespace mbridge {

// Document i has default_rng(0).integers(1, 4096) tokens: (j + 1) mod vocab_size, then eod_id as the last one.
class MockCorpus : public TokenSource {
 public:
  MockCorpus(int64_t vocab_size, int64_t eod_id);
  void Read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const override;
  const std::string& name() const override;

 private:
  int32_t vocab_size_, eod_id_;
  std::vector<int32_t> lengths_;
};

}  // namespace mbridge
