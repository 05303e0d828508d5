// Megatron-LM flags and what they are here. Flags of one key come from config.proto, the others stand in flag_table.cc.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "recipes/config/schema.h"

namespace mbridge::recipes {

struct MegatronFlag {
  enum class Arity { kNone, kOne, kMany };
  enum class Kind {
    kKey,      // One key takes the value.
    kFixed,    // Sets fixed values, `fixed`.
    kSpecial,  // Code in translate.cc.
    kDropped,  // No counterpart is needed; `note` says why.
    kRefused,  // Can't be expressed; `note` says why.
  };

  std::string name;
  Kind kind = Kind::kKey;
  Arity arity = Arity::kOne;
  const Key* key = nullptr;                                // kKey.
  std::vector<std::pair<std::string, std::string>> fixed;  // kFixed: key and value.
  std::string keys;                                        // kSpecial: the keys, for the manual.
  std::string note;
};

// By flag name. Underscores in flags count as dashes.
const std::map<std::string, MegatronFlag>& MegatronFlags();

// Megatron-LM's default of a key, which is not always Megatron-Bridge's; null = none.
Value MegatronDefault(const Key& key);

}  // namespace mbridge::recipes
