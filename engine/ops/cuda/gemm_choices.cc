#include "engine/ops/cuda/gemm_choices.h"

#include <sstream>

#include "engine/core/cuda/check.h"
#include "engine/core/file.h"

namespace mbridge::cuda {
namespace {

constexpr int64_t kMaxFileBytes = 16 << 20;

// First line of the file: a choice holds for one GPU model and one cuBLAS.
std::string Header() {
  int device = 0;
  cudaDeviceProp properties{};
  MB_CUDA(cudaGetDevice(&device));
  MB_CUDA(cudaGetDeviceProperties(&properties, device));
  return fmt::format("GEMM choices 1, {}, cuBLASLt {}", properties.name, cublasLtGetVersion());
}

}  // namespace

GemmChoices::GemmChoices(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  const auto text = ReadWholeFile(path_, kMaxFileBytes);
  if (absl::IsNotFound(text.status())) return;
  if (!text.ok()) ThrowEngineError("GEMM choices: {}", std::string(text.status().message()));
  std::istringstream lines(*text);
  std::string line;
  if (!std::getline(lines, line) || line != Header()) return;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    GemmKey key;
    cublasLtMatmulAlgo_t algorithm;
    for (int64_t& value : key) fields >> value;
    for (uint64_t& word : algorithm.data) fields >> word;
    if (!fields) ThrowEngineError("GEMM choices {}: damaged line '{}'; delete the file", path_, line);
    algorithms_.emplace(key, algorithm);
  }
}

const cublasLtMatmulAlgo_t* GemmChoices::Find(const GemmKey& key) const {
  const auto found = algorithms_.find(key);
  return found == algorithms_.end() ? nullptr : &found->second;
}

void GemmChoices::Add(const GemmKey& key, const cublasLtMatmulAlgo_t& algorithm) {
  algorithms_.insert_or_assign(key, algorithm);
  changed_ = true;
}

void GemmChoices::Save() {
  if (path_.empty() || !changed_) return;
  std::ostringstream text;
  text << Header() << '\n';
  for (const auto& [key, algorithm] : algorithms_) {
    for (const int64_t value : key) text << value << ' ';
    for (const uint64_t word : algorithm.data) text << word << ' ';
    text << '\n';
  }
  if (const absl::Status status = WriteFileDurably(path_, text.str()); !status.ok()) {
    ThrowEngineError("GEMM choices: {}", std::string(status.message()));
  }
  changed_ = false;
}

}  // namespace mbridge::cuda
