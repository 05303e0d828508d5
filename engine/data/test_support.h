// For this folder's tests: hashes, a temporary folder, the recorded data sets.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace mbridge::testing_data {

inline std::string MlmPath(const std::string& name) { return std::string(MB_SOURCE_DIR) + "/tests/data/mlm/" + name; }

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
inline void WriteAll(const std::string& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }
inline const nlohmann::json& Oracle() {
  static const nlohmann::json kOracle = nlohmann::json::parse(ReadAll(MlmPath("blend/expected.json")));
  return kOracle;
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  template <class T> void Add(std::span<const T> values) { EVP_DigestUpdate(context_, values.data(), values.size_bytes()); }
  std::string Hex() {
    unsigned char digest[32];
    EVP_DigestFinal_ex(context_, digest, nullptr);
    std::string hex;
    for (unsigned char byte : digest) hex += fmt::format("{:02x}", byte);
    return hex;
  }

 private:
  EVP_MD_CTX* context_;
};
template <class T> std::string Sha256Of(const std::vector<T>& values) {
  Sha256 hash;
  hash.Add(std::span<const T>(values));
  return hash.Hex();
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    // In memory where that exists: these tests sync hundreds of files.
    const std::string base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::filesystem::temp_directory_path().string();
    std::string pattern = base + "/mb_data_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace mbridge::testing_data
