// Values read from a pickle. Classes and functions that it names are names only: nothing is looked up, built or called.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace mbridge {

struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,   // integer
    kInt,    // integer; one of more than 64 bits is kBytes.
    kFloat,  // real
    kText,   // text, UTF-8
    kBytes,  // text
    kTuple,  // items; also lists and sets
    kList,
    kSet,
    kDict,    // items: key, value, key, value, ...
    kGlobal,  // text: "module name"
    kObject,  // What calling `callee` with `arguments` would make; `state`: what it would be given then. items as kList or kDict.
    kPersistent,  // arguments: the id, a reference to something outside of the pickle.
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<const PickleValue*> items;
  const PickleValue* callee = nullptr;
  const PickleValue* arguments = nullptr;
  const PickleValue* state = nullptr;

  bool Is(Kind other) const { return kind == other; }
  bool IsSequence() const { return kind == Kind::kTuple || kind == Kind::kList || kind == Kind::kSet; }
  // Of a dict; null when there is no such key.
  const PickleValue* Find(std::string_view key) const {
    for (size_t i = 0; kind == Kind::kDict && i + 1 < items.size(); i += 2) {
      if (items[i]->kind == Kind::kText && items[i]->text == key) return items[i + 1];
    }
    return nullptr;
  }
  // Whether this is what calling the class or function "module name" would make.
  bool IsMadeBy(std::string_view global) const {
    return kind == Kind::kObject && callee != nullptr && callee->kind == Kind::kGlobal && callee->text == global;
  }
};

// Owns its values, which may refer to each other in any way, circles too: never walk them without a bound.
struct Pickle {
  std::deque<PickleValue> values;
  const PickleValue* root = nullptr;
};

}  // namespace mbridge
