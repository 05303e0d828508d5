#include "engine/megatron/pickle_reader.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <iterator>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

using Kind = PickleValue::Kind;

// Sorted. What checkpoints of Megatron-LM and torch hold beside plain containers.
constexpr std::string_view kGlobals[] = {
    "_codecs encode",
    "_io BytesIO",
    "argparse Namespace",
    "builtins bytearray",
    "builtins complex",
    "builtins set",
    "builtins slice",
    "collections OrderedDict",
    "collections defaultdict",
    "numpy dtype",
    "numpy ndarray",
    "numpy._core.multiarray _reconstruct",
    "numpy._core.multiarray scalar",
    "numpy.core.multiarray _reconstruct",
    "numpy.core.multiarray scalar",
    "numpy.dtypes UInt32DType",
    "pathlib PosixPath",
    "signal Signals",
    "torch Size",
    "torch Tensor",
    "torch bfloat16",
    "torch bool",
    "torch complex128",
    "torch complex64",
    "torch device",
    "torch float",
    "torch float16",
    "torch float32",
    "torch float64",
    "torch float8_e4m3fn",
    "torch float8_e5m2",
    "torch int16",
    "torch int32",
    "torch int64",
    "torch int8",
    "torch strided",
    "torch uint16",
    "torch uint32",
    "torch uint64",
    "torch uint8",
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.nn.parameter Parameter",
    "torch.serialization _get_layout",
    "torch.storage UntypedStorage",
    "types SimpleNamespace",
};
static_assert(std::is_sorted(std::begin(kGlobals), std::end(kGlobals)));
// Names that begin so belong to the frameworks: enumerations and plain records of settings and of the layout.
constexpr std::string_view kGlobalPrefixes[] = {
    "megatron.",
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.sharded_tensor.metadata ",
};
// torch.FloatStorage and its siblings.
bool IsStorage(std::string_view global) {
  constexpr std::string_view kModule = "torch ", kEnd = "Storage";
  return global.starts_with(kModule) && global.ends_with(kEnd) &&
         std::all_of(global.begin() + kModule.size(), global.end(), [](char c) { return std::isalnum(c) != 0 || c == '_'; });
}

class Machine {
 public:
  Machine(std::string_view bytes, const std::string& where, const PickleLimits& limits)
      : bytes_(bytes), where_(where), limits_(limits) {}

  absl::StatusOr<Pickle> Run() {
    while (!stopped_) MB_RETURN_IF_ERROR(Step());
    if (stack_.size() != 1 || !marks_.empty()) return Broken("values are left when it ends");
    pickle_.root = stack_.back();
    return std::move(pickle_);
  }

 private:
  absl::Status Broken(std::string_view what) const {
    return absl::DataLossError(fmt::format("{}: not a whole pickle: {} (byte {})", where_, what, at_));
  }
  absl::Status Refused(std::string_view what) const {
    return MakeStatus(
        absl::StatusCode::kInvalidArgument, v1::REASON_UNSUPPORTED_MODEL,
        fmt::format("{}: refused {}; only tensors, numbers and plain containers are read, nothing is executed", where_, what));
  }

  absl::Status Take(uint64_t count, std::string_view* taken) {
    if (count > bytes_.size() - at_) return Broken("it ends early");
    *taken = bytes_.substr(at_, count);
    at_ += count;
    return absl::OkStatus();
  }
  // Little-endian, up to 8 bytes.
  absl::Status TakeNumber(int width, uint64_t* number) {
    std::string_view taken;
    MB_RETURN_IF_ERROR(Take(static_cast<uint64_t>(width), &taken));
    *number = 0;
    std::memcpy(number, taken.data(), taken.size());
    return absl::OkStatus();
  }
  absl::Status TakeLine(std::string_view* line) {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos || end - at_ > 4096) return Broken("a name has no end");
    *line = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return absl::OkStatus();
  }

  absl::StatusOr<PickleValue*> New(Kind kind) {
    if (static_cast<int64_t>(pickle_.values.size()) >= limits_.values) return Broken("it holds too many values");
    PickleValue& value = pickle_.values.emplace_back();
    value.kind = kind;
    return &value;
  }
  absl::Status Push(Kind kind, int64_t integer = 0, std::string_view text = {}) {
    MB_ASSIGN_OR_RETURN(PickleValue * value, New(kind));
    value->integer = integer;
    value->text = text;
    stack_.push_back(value);
    return absl::OkStatus();
  }
  absl::StatusOr<PickleValue*> Pop() {
    if (stack_.size() <= Floor()) return Broken("a value is missing");
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  absl::StatusOr<PickleValue*> Top() {
    if (stack_.size() <= Floor()) return Broken("a value is missing");
    return stack_.back();
  }
  size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }
  absl::StatusOr<std::vector<const PickleValue*>> PopMarked() {
    if (marks_.empty()) return Broken("a mark is missing");
    std::vector<const PickleValue*> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  absl::Status PushText(Kind kind, int width) {
    uint64_t length = 0;
    std::string_view text;
    MB_RETURN_IF_ERROR(TakeNumber(width, &length));
    MB_RETURN_IF_ERROR(Take(length, &text));
    return Push(kind, 0, text);
  }
  absl::Status PushLong(int width) {
    uint64_t length = 0;
    std::string_view digits;
    MB_RETURN_IF_ERROR(TakeNumber(width, &length));
    MB_RETURN_IF_ERROR(Take(length, &digits));
    if (digits.size() > 8) return Push(Kind::kBytes, 0, digits);
    uint64_t number = !digits.empty() && (digits.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    std::memcpy(&number, digits.data(), digits.size());
    return Push(Kind::kInt, static_cast<int64_t>(number));
  }
  absl::Status PushFloat() {
    uint64_t bits = 0;
    MB_RETURN_IF_ERROR(TakeNumber(8, &bits));
    MB_RETURN_IF_ERROR(Push(Kind::kFloat));
    stack_.back()->real = std::bit_cast<double>(__builtin_bswap64(bits));
    return absl::OkStatus();
  }
  absl::Status PushGlobal(std::string_view module, std::string_view name) {
    constexpr size_t kMaxName = 512;
    if (module.size() > kMaxName || name.size() > kMaxName) return Broken("a name is too long");
    const std::string global = fmt::format("{} {}", module, name);
    if (!IsKnownGlobal(global)) return Refused(fmt::format("the class or function {}.{}", module, name));
    return Push(Kind::kGlobal, 0, global);
  }
  absl::Status PushStackGlobal() {
    MB_ASSIGN_OR_RETURN(const PickleValue* name, Pop());
    MB_ASSIGN_OR_RETURN(const PickleValue* module, Pop());
    if (!name->Is(Kind::kText) || !module->Is(Kind::kText)) return Broken("a class has no name");
    return PushGlobal(module->text, name->text);
  }
  absl::Status PushTuple(size_t count) {
    if (stack_.size() - Floor() < count) return Broken("a value is missing");
    MB_ASSIGN_OR_RETURN(PickleValue * tuple, New(Kind::kTuple));
    tuple->items.assign(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    stack_.push_back(tuple);
    return absl::OkStatus();
  }
  absl::Status PushMarked(Kind kind) {
    MB_ASSIGN_OR_RETURN(std::vector<const PickleValue*> items, PopMarked());
    if (kind == Kind::kDict && items.size() % 2 != 0) return Broken("a key has no value");
    MB_ASSIGN_OR_RETURN(PickleValue * value, New(kind));
    value->items = std::move(items);
    stack_.push_back(value);
    return absl::OkStatus();
  }

  absl::Status Extend(std::vector<const PickleValue*> items, bool pairs) {
    MB_ASSIGN_OR_RETURN(PickleValue * target, Top());
    const bool fits =
        target->Is(Kind::kObject) || (pairs ? target->Is(Kind::kDict) : target->Is(Kind::kList) || target->Is(Kind::kSet));
    if (!fits || (pairs && items.size() % 2 != 0)) return Broken("items are added to something else than a container");
    target->items.insert(target->items.end(), items.begin(), items.end());
    return absl::OkStatus();
  }
  absl::Status ExtendByTop(size_t count) {
    std::vector<const PickleValue*> items(count);
    for (size_t i = count; i-- > 0;) {
      MB_ASSIGN_OR_RETURN(items[i], Pop());
    }
    return Extend(std::move(items), count == 2);
  }

  // REDUCE and NEWOBJ: what calling a known class or function would make.
  absl::Status PushCall() {
    MB_ASSIGN_OR_RETURN(const PickleValue* arguments, Pop());
    MB_ASSIGN_OR_RETURN(const PickleValue* callee, Pop());
    if (!callee->Is(Kind::kGlobal)) return Refused("a call of something that is not a class or function by name");
    if (!arguments->Is(Kind::kTuple)) return Broken("a call has no tuple of arguments");
    const bool is_dict = callee->text == "collections OrderedDict" || callee->text == "collections defaultdict";
    MB_ASSIGN_OR_RETURN(PickleValue * object, New(is_dict ? Kind::kDict : Kind::kObject));
    object->callee = callee;
    object->arguments = arguments;
    stack_.push_back(object);
    return absl::OkStatus();
  }
  absl::Status PushCallWithKeywords() {
    MB_ASSIGN_OR_RETURN(const PickleValue* keywords, Pop());
    if (!keywords->Is(Kind::kDict)) return Broken("a call has no dict of keywords");
    if (!keywords->items.empty()) return Refused("a call with keywords");
    return PushCall();
  }
  absl::Status Build() {
    MB_ASSIGN_OR_RETURN(const PickleValue* state, Pop());
    MB_ASSIGN_OR_RETURN(PickleValue * object, Top());
    if (!object->Is(Kind::kObject) && !object->Is(Kind::kDict)) return Broken("a state belongs to something else than an object");
    object->state = state;
    return absl::OkStatus();
  }
  absl::Status PushPersistent() {
    MB_ASSIGN_OR_RETURN(const PickleValue* id, Pop());
    MB_RETURN_IF_ERROR(Push(Kind::kPersistent));
    stack_.back()->arguments = id;
    return absl::OkStatus();
  }

  absl::Status Memoize(uint64_t index) {
    MB_ASSIGN_OR_RETURN(PickleValue * value, Top());
    if (index > memo_.size()) return Broken("the numbers of its values have a gap");
    if (index == memo_.size()) memo_.push_back(nullptr);
    memo_[index] = value;
    return absl::OkStatus();
  }
  absl::Status MemoizeIndexed(int width) {
    uint64_t index = 0;
    MB_RETURN_IF_ERROR(TakeNumber(width, &index));
    return Memoize(index);
  }
  absl::Status PushMemoized(int width) {
    uint64_t index = 0;
    MB_RETURN_IF_ERROR(TakeNumber(width, &index));
    if (index >= memo_.size()) return Broken("it refers to a value that is not there");
    stack_.push_back(memo_[index]);
    return absl::OkStatus();
  }
  absl::Status PushSigned(int width) {
    uint64_t number = 0;
    MB_RETURN_IF_ERROR(TakeNumber(width, &number));
    return Push(Kind::kInt, width == 4 ? static_cast<int32_t>(number) : static_cast<int64_t>(number));
  }
  absl::Status Mark() {
    if (static_cast<int64_t>(marks_.size()) >= limits_.depth) return Broken("it is nested too deeply");
    marks_.push_back(stack_.size());
    return absl::OkStatus();
  }

  absl::Status Step() {
    uint64_t code = 0, number = 0;
    MB_RETURN_IF_ERROR(TakeNumber(1, &code));
    if (static_cast<int64_t>(stack_.size()) > limits_.values) return Broken("it holds too many values");
    switch (code) {
      case 0x80: {  // PROTO
        MB_RETURN_IF_ERROR(TakeNumber(1, &number));
        return number >= 2 && number <= 5 ? absl::OkStatus() : Broken(fmt::format("protocol {}; 2 to 5 are read", number));
      }
      case 0x95: return TakeNumber(8, &number);  // FRAME: no need to heed it.
      case '.': stopped_ = true; return absl::OkStatus();
      case 'N': return Push(Kind::kNone);
      case 0x88: return Push(Kind::kBool, 1);
      case 0x89: return Push(Kind::kBool, 0);
      case 'J': return PushSigned(4);
      case 'K': return PushSigned(1);
      case 'M': return PushSigned(2);
      case 0x8a: return PushLong(1);
      case 0x8b: return PushLong(4);
      case 'G': return PushFloat();
      case 'X': return PushText(Kind::kText, 4);
      case 0x8c: return PushText(Kind::kText, 1);
      case 0x8d: return PushText(Kind::kText, 8);
      case 'B': return PushText(Kind::kBytes, 4);
      case 'C': return PushText(Kind::kBytes, 1);
      case 0x8e:
      case 0x96: return PushText(Kind::kBytes, 8);  // BINBYTES8, BYTEARRAY8
      case 'T': return PushText(Kind::kBytes, 4);   // BINSTRING, of Python 2
      case 'U': return PushText(Kind::kBytes, 1);
      case '(': return Mark();
      case ')': return PushTuple(0);
      case 0x85: return PushTuple(1);
      case 0x86: return PushTuple(2);
      case 0x87: return PushTuple(3);
      case 't': return PushMarked(Kind::kTuple);
      case ']': return Push(Kind::kList);
      case 'l': return PushMarked(Kind::kList);
      case '}': return Push(Kind::kDict);
      case 'd': return PushMarked(Kind::kDict);
      case 0x8f: return Push(Kind::kSet);
      case 0x91: return PushMarked(Kind::kSet);  // FROZENSET
      case 'a': return ExtendByTop(1);
      case 's': return ExtendByTop(2);
      case 'e':
      case 0x90:
      case 'u': {  // APPENDS, ADDITEMS, SETITEMS
        MB_ASSIGN_OR_RETURN(std::vector<const PickleValue*> items, PopMarked());
        return Extend(std::move(items), code == 'u');
      }
      case '0': return Pop().status();
      case '1': return PopMarked().status();
      case 'q': return MemoizeIndexed(1);
      case 'r': return MemoizeIndexed(4);
      case 0x94: return Memoize(memo_.size());
      case 'h': return PushMemoized(1);
      case 'j': return PushMemoized(4);
      case 'c': {
        std::string_view module, name;
        MB_RETURN_IF_ERROR(TakeLine(&module));
        MB_RETURN_IF_ERROR(TakeLine(&name));
        return PushGlobal(module, name);
      }
      case 0x93: return PushStackGlobal();
      case 'R':
      case 0x81: return PushCall();
      case 0x92: return PushCallWithKeywords();
      case 'b': return Build();
      case 'Q': return PushPersistent();
      default: return Refused(fmt::format("the pickle operation 0x{:02x} at byte {}", code, at_ - 1));
    }
  }

  std::string_view bytes_;
  const std::string& where_;
  const PickleLimits& limits_;
  size_t at_ = 0;
  bool stopped_ = false;
  Pickle pickle_;
  std::vector<PickleValue*> stack_, memo_;
  std::vector<size_t> marks_;
};

}  // namespace

bool IsKnownGlobal(std::string_view global) {
  return std::binary_search(std::begin(kGlobals), std::end(kGlobals), global) || IsStorage(global) ||
         std::any_of(std::begin(kGlobalPrefixes), std::end(kGlobalPrefixes),
                     [&](std::string_view prefix) { return global.starts_with(prefix); });
}

absl::StatusOr<Pickle> ReadPickle(std::string_view bytes, const std::string& where, const PickleLimits& limits) {
  return Machine(bytes, where, limits).Run();
}

}  // namespace mbridge
