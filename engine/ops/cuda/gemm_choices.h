// The algorithms that were timed, by problem, and the file that keeps them from one run to the next.
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace mbridge::cuda {

// Everything that cuBLASLt's choice depends on: sizes, strides, types, transposes, alignments, workspace, batch.
using GemmKey = std::array<int64_t, 13>;

struct GemmKeyHash {
  size_t operator()(const GemmKey& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const int64_t value : key) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

class GemmChoices {
 public:
  // Reads `path` if it exists; empty: keeps nothing on disk.
  explicit GemmChoices(std::string path = "");
  // Null where none is known.
  const cublasLtMatmulAlgo_t* Find(const GemmKey& key) const;
  void Add(const GemmKey& key, const cublasLtMatmulAlgo_t& algorithm);
  void Save();

 private:
  std::string path_;
  bool changed_ = false;
  std::unordered_map<GemmKey, cublasLtMatmulAlgo_t, GemmKeyHash> algorithms_;
};

}  // namespace mbridge::cuda
