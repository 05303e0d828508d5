// For tests against Megatron-LM's recorded initial weights: the files, the model they belong to, the hash they give.
#pragma once

#include <openssl/sha.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/gpt_config.h"

namespace mbridge::test {

// A file of tests/data/mlm, or of the folder MB_TEST_DATA where the tests run from a bundle.
inline nlohmann::json ReadReference(const std::string& name) {
  const char* folder = std::getenv("MB_TEST_DATA");
  std::ifstream file((folder != nullptr ? std::string(folder) : std::string(MB_SOURCE_DIR) + "/tests/data/mlm") + "/" + name);
  return nlohmann::json::parse(file);
}

inline GptConfig ReferenceConfig(int64_t layers, int64_t seq_length, int64_t vocabulary) {
  GptConfig config;
  config.num_layers = layers;
  config.hidden_size = 256;
  config.num_attention_heads = config.num_query_groups = 4;
  config.kv_channels = 64;
  config.ffn_hidden_size = 1024;
  config.seq_length = config.max_position_embeddings = seq_length;
  config.padded_vocab_size = vocabulary;
  return config;
}

inline std::string Sha256(const void* data, size_t bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(static_cast<const unsigned char*>(data), bytes, digest);
  std::string text;
  for (unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace mbridge::test
