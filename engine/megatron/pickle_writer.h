// Writes pickles (protocol 2) of plain containers, numbers and objects by name. Calls append to the stream in the order of a
// stack machine: operands first. It is up to the caller to leave exactly one value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace mbridge {

class PickleWriter {
 public:
  PickleWriter() : bytes_("\x80\x02") {}

  PickleWriter& None() { return Op('N'); }
  PickleWriter& Bool(bool value) { return Op(value ? '\x88' : '\x89'); }
  PickleWriter& Int(int64_t value);
  PickleWriter& Float(double value);
  PickleWriter& Text(std::string_view utf8);
  // The class or function itself.
  PickleWriter& Global(std::string_view module, std::string_view name);

  // Between the two: items; of a dict keys and values in turns.
  PickleWriter& BeginTuple() { return Op('('); }
  PickleWriter& EndTuple() { return Op('t'); }
  PickleWriter& BeginList() { return Op(']').Op('('); }
  PickleWriter& EndList() { return Op('e'); }
  PickleWriter& BeginDict() { return Op('}').Op('('); }
  PickleWriter& EndDict() { return Op('u'); }

  // Global, tuple of arguments: their call.
  PickleWriter& Call() { return Op('R'); }
  // An object of the class, made without arguments; SetState after its state.
  PickleWriter& NewObject(std::string_view module, std::string_view name) { return Global(module, name).Op(')').Op('\x81'); }
  PickleWriter& SetState() { return Op('b'); }
  // The value before it is the id of something outside.
  PickleWriter& Persistent() { return Op('Q'); }

  // Ends the pickle and returns it; nothing may follow.
  std::string Finish();

 private:
  PickleWriter& Op(char code) {
    bytes_.push_back(code);
    return *this;
  }
  PickleWriter& Number(uint64_t value, int width);

  std::string bytes_;
};

}  // namespace mbridge
