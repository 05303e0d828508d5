// The layout torch: a folder mp_rank_TT[_PPP][_EEE] for each tensor-, pipeline- and expert-parallel rank, with one file of
// torch.save (megatron/training/checkpointing.py of Megatron-LM).
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include "engine/megatron/stored_model.h"

namespace mbridge {
namespace {

namespace fs = std::filesystem;

using Kind = PickleValue::Kind;

struct RankFolder {
  std::string name, file;
  std::vector<int64_t> numbers;  // TT, then the others that are there.
  int64_t tensor = 0, pipeline = 0, expert = 0;
};

constexpr std::string_view kFolder = "mp_rank_";
constexpr const char* kFileNames[] = {"model_optim_rng.pt", "model_rng.pt"};

bool ReadNumbers(std::string_view text, std::vector<int64_t>* numbers) {
  const char *at = text.data(), *end = text.data() + text.size();
  while (true) {
    int64_t number = 0;
    const auto [after, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0) return false;
    numbers->push_back(number);
    if (after == end) return numbers->size() <= 3;
    if (*after != '_') return false;
    at = after + 1;
  }
}

// Tensors of one part of a rank's model, by name, with the layers counted from the first of the part.
using NamedPlaces = std::vector<std::pair<std::string, TorchTensor>>;

struct ModelPart {
  RankFolder rank;
  int64_t chunk = 0;  // Of the virtual pipeline.
  int64_t layers = 0;
  NamedPlaces tensors;
};

class RankReader {
 public:
  RankReader(const AllowedRoots& roots, StoredModel* model) : roots_(roots), model_(*model) {}

  absl::Status Read() {
    MB_RETURN_IF_ERROR(FindRanks());
    for (const RankFolder& rank : ranks_) MB_RETURN_IF_ERROR(ReadRank(rank));
    MB_RETURN_IF_ERROR(NameRanks());
    return Merge();
  }

 private:
  absl::Status FindRanks() {
    std::error_code error;
    for (fs::directory_iterator entry(model_.path, error), end; !error && entry != end; entry.increment(error)) {
      RankFolder rank{.name = entry->path().filename().string(), .file = "", .numbers = {}};
      if (!rank.name.starts_with(kFolder) || !ReadNumbers(std::string_view(rank.name).substr(kFolder.size()), &rank.numbers))
        continue;
      for (const char* name : kFileNames) {
        const std::string file = fmt::format("{}/{}", rank.name, name);
        if (rank.file.empty() && fs::exists(fmt::format("{}/{}", model_.path, file), error)) rank.file = file;
      }
      if (rank.file.empty()) return BrokenCheckpoint(model_.path, fmt::format("{} has no {}", rank.name, kFileNames[0]));
      MB_RETURN_IF_ERROR(CheckRoots(fmt::format("{}/{}", model_.path, rank.file), roots_));
      ranks_.push_back(std::move(rank));
    }
    if (error) return FileError(error.value(), "list", model_.path);
    if (ranks_.empty()) return BrokenCheckpoint(model_.path, "it has no mp_rank_ folder with numbers");
    std::sort(ranks_.begin(), ranks_.end(), [](const RankFolder& a, const RankFolder& b) { return a.numbers < b.numbers; });
    return absl::OkStatus();
  }

  absl::Status ReadRank(const RankFolder& rank) {
    MB_ASSIGN_OR_RETURN(const FileReader* file, model_.files->Open(rank.file));
    MB_ASSIGN_OR_RETURN(TorchArchive archive, TorchArchive::Open(*file));
    const PickleValue& root = archive.root();
    const std::string path = file->path();
    if (!root.Is(Kind::kDict)) return BrokenCheckpoint(path, "it holds no dict");
    MB_RETURN_IF_ERROR(CheckVersion(path, root));
    bool found = false;
    for (int64_t chunk = -1; chunk < 64; ++chunk) {
      const PickleValue* model = root.Find(chunk < 0 ? "model" : fmt::format("model{}", chunk));
      if (model == nullptr) continue;
      found = true;
      MB_RETURN_IF_ERROR(ReadPart(archive, path, *model, rank, std::max<int64_t>(chunk, 0)));
    }
    if (!found) return BrokenCheckpoint(path, "it has no model");
    if (const PickleValue* optimizer = root.Find("optimizer"); optimizer != nullptr && !optimizer->Is(Kind::kNone)) {
      std::error_code error;
      model_.optimizer_tensors += 1;
      model_.optimizer_bytes += static_cast<int64_t>(fs::file_size(path, error));
    }
    if (model_.arguments == nullptr && ArgumentsOf(root) != nullptr) {
      model_.arguments = ArgumentsOf(root);
      model_.common = std::move(archive).TakePickle();
    }
    return absl::OkStatus();
  }

  static absl::Status CheckVersion(const std::string& path, const PickleValue& root) {
    const PickleValue* version = root.Find("checkpoint_version");
    const double number = version == nullptr        ? 0
                          : version->Is(Kind::kInt) ? static_cast<double>(version->integer)
                                                    : version->real;
    if (number >= 3.0) return absl::OkStatus();
    return UnsupportedCheckpoint(
        path, fmt::format("checkpoint_version is {}: rows of queries, keys and values have another order before "
                          "3; load and save it with a newer Megatron-LM",
                          version == nullptr ? std::string("missing") : fmt::format("{}", number)));
  }

  absl::Status ReadPart(const TorchArchive& archive, const std::string& path, const PickleValue& model, const RankFolder& rank,
                        int64_t chunk) {
    if (!model.Is(Kind::kDict)) return BrokenCheckpoint(path, "its model is no dict");
    if (model.Find("language_model") != nullptr) {
      return UnsupportedCheckpoint(path,
                                   "the model has the classes of Megatron-LM before Megatron-Core (language_model); "
                                   "tools/checkpoint/convert.py of Megatron-LM makes a Megatron-Core checkpoint of it");
    }
    ModelPart part{.rank = rank, .chunk = chunk, .layers = 0, .tensors = {}};
    std::set<int64_t> layers;
    for (size_t i = 0; i + 1 < model.items.size(); i += 2) {
      if (!model.items[i]->Is(Kind::kText)) return BrokenCheckpoint(path, "a tensor has no name");
      const std::string& name = model.items[i]->text;
      if (name.ends_with("_extra_state") || !TorchArchive::IsTensor(*model.items[i + 1])) {
        ++model_.other_objects;
        continue;
      }
      int64_t layer = 0;
      size_t rest = 0;
      if (SplitLayerName(name, &layer, &rest)) layers.insert(layer);
      MB_ASSIGN_OR_RETURN(TorchTensor tensor, archive.TensorOf(*model.items[i + 1]));
      part.tensors.emplace_back(name, std::move(tensor));
    }
    part.layers = static_cast<int64_t>(layers.size());
    if (!layers.empty() && (*layers.begin() != 0 || *layers.rbegin() != part.layers - 1))
      return BrokenCheckpoint(path, "its layers are not counted from 0 without gaps");
    parts_.push_back(std::move(part));
    return absl::OkStatus();
  }

  // A second number alone is of the pipeline or of the experts; only the run's arguments tell.
  absl::Status NameRanks() {
    const auto argument = [&](const char* name) {
      return model_.arguments == nullptr ? 1 : IntArgument(*model_.arguments, name, 1);
    };
    const int64_t pipeline = argument("pipeline_model_parallel_size"), experts = argument("expert_model_parallel_size");
    std::set<std::vector<int64_t>> seen;
    for (ModelPart& part : parts_) {
      RankFolder& rank = part.rank;
      rank.tensor = rank.numbers[0];
      if (rank.numbers.size() == 3) {
        rank.pipeline = rank.numbers[1];
        rank.expert = rank.numbers[2];
      } else if (rank.numbers.size() == 2) {
        (pipeline == 1 && experts > 1 ? rank.expert : rank.pipeline) = rank.numbers[1];
      }
      tensor_ranks_ = std::max(tensor_ranks_, rank.tensor + 1);
      pipeline_ranks_ = std::max(pipeline_ranks_, rank.pipeline + 1);
      expert_ranks_ = std::max(expert_ranks_, rank.expert + 1);
      seen.insert({rank.tensor, rank.pipeline, rank.expert});
    }
    if (static_cast<int64_t>(seen.size()) != static_cast<int64_t>(ranks_.size()) || ranks_.size() > 65536 ||
        tensor_ranks_ * pipeline_ranks_ * expert_ranks_ != static_cast<int64_t>(ranks_.size())) {
      return BrokenCheckpoint(model_.path, fmt::format("{} folders mp_rank_ don't make {} x {} x {} ranks", ranks_.size(),
                                                       tensor_ranks_, pipeline_ranks_, expert_ranks_));
    }
    if (model_.arguments != nullptr &&
        IntArgument(*model_.arguments, "tensor_model_parallel_size", tensor_ranks_) != tensor_ranks_)
      return BrokenCheckpoint(model_.path, "tensor-parallel ranks are missing");
    if (expert_ranks_ > 1 && model_.arguments != nullptr &&
        IntArgument(*model_.arguments, "expert_tensor_parallel_size", tensor_ranks_) != tensor_ranks_) {
      return UnsupportedCheckpoint(model_.path, "experts have another tensor-parallel size than the rest; save it as torch_dist");
    }
    return absl::OkStatus();
  }

  // The layers of a part come after those of the parts before it: chunk by chunk, stage by stage.
  int64_t FirstLayerOf(const ModelPart& part) const {
    int64_t first = 0;
    for (const ModelPart& other : parts_) {
      if (other.rank.tensor != part.rank.tensor || other.rank.expert != part.rank.expert) continue;
      if (std::pair(other.chunk, other.rank.pipeline) < std::pair(part.chunk, part.rank.pipeline)) first += other.layers;
    }
    return first;
  }

  absl::Status Merge() {
    for (const ModelPart& part : parts_) {
      const int64_t first = FirstLayerOf(part), experts = ExpertsOf(part);
      for (const auto& [name, place] : part.tensors) {
        int64_t layer = 0;
        size_t rest = 0;
        std::string whole = name;
        if (SplitLayerName(name, &layer, &rest)) {
          const ExpertName expert = SplitExpert(name.substr(rest));
          if (expert.index < 0 && part.rank.expert > 0) continue;  // A copy.
          const std::string numbered =
              expert.index < 0 ? name.substr(rest)
                               : fmt::format("{}{}{}", expert.before, part.rank.expert * experts + expert.index, expert.after);
          whole = fmt::format("decoder.layers.{}.{}", first + layer, numbered);
        } else if (part.rank.expert > 0) {
          continue;
        }
        MB_RETURN_IF_ERROR(AddShard(part, whole, place));
      }
    }
    for (const auto& [name, tensor] : model_.tensors) {
      if (static_cast<int64_t>(tensor.pieces.size()) != tensor_ranks_)
        return BrokenCheckpoint(model_.path,
                                fmt::format("{} of {} shards of {} are there", tensor.pieces.size(), tensor_ranks_, name));
    }
    return absl::OkStatus();
  }

  absl::Status AddShard(const ModelPart& part, const std::string& name, const TorchTensor& place) {
    StoredTensor& tensor = model_.tensors[name];
    const auto rank = static_cast<size_t>(part.rank.tensor);
    if (tensor.pieces.size() > rank) return absl::OkStatus();  // Another stage's copy, of a tied table.
    if (tensor.pieces.size() < rank) return BrokenCheckpoint(model_.path, fmt::format("a shard of {} is missing", name));
    if (rank > 0 && (tensor.shape != place.shape || tensor.type != place.type))
      return BrokenCheckpoint(model_.path, fmt::format("the shards of {} differ in shape or type", name));
    tensor.type = place.type;
    tensor.dtype = place.dtype;
    tensor.shape = place.shape;
    tensor.split = true;
    StoredPiece piece;
    piece.file = part.rank.file;
    piece.place = place;
    tensor.pieces.push_back(std::move(piece));
    return absl::OkStatus();
  }

  // "mlp.experts.local_experts.3.linear_fc1.weight" or "mlp.experts.linear_fc1.weight3" around their number.
  struct ExpertName {
    std::string before, after;
    int64_t index = -1;
  };
  static ExpertName SplitExpert(const std::string& rest) {
    constexpr std::string_view kLocal = "mlp.experts.local_experts.", kGrouped = "mlp.experts.linear_fc";
    ExpertName name;
    const auto number_at = [&](size_t begin, size_t end) {
      int64_t number = -1;
      const auto [after, error] = std::from_chars(rest.data() + begin, rest.data() + end, number);
      if (error != std::errc() || number < 0 || number > 1'000'000) return;
      name = {rest.substr(0, begin), std::string(after, rest.data() + rest.size()), number};
    };
    if (rest.starts_with(kLocal)) number_at(kLocal.size(), rest.size());
    if (rest.starts_with(kGrouped)) {
      const size_t digits = rest.find_last_not_of("0123456789") + 1;
      if (digits < rest.size()) number_at(digits, rest.size());
    }
    return name;
  }
  static int64_t ExpertsOf(const ModelPart& part) {
    int64_t experts = 0;
    for (const auto& [name, place] : part.tensors) {
      int64_t layer = 0;
      size_t rest = 0;
      if (SplitLayerName(name, &layer, &rest)) experts = std::max(experts, SplitExpert(name.substr(rest)).index + 1);
    }
    return experts;
  }

  const AllowedRoots& roots_;
  StoredModel& model_;
  std::vector<RankFolder> ranks_;
  std::vector<ModelPart> parts_;
  int64_t tensor_ranks_ = 1, pipeline_ranks_ = 1, expert_ranks_ = 1;
};

}  // namespace

absl::Status ReadRankFiles(const AllowedRoots& roots, StoredModel* model) {
  model->format = "torch";
  return RankReader(roots, model).Read();
}

}  // namespace mbridge
