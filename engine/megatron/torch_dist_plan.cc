#include "engine/megatron/torch_dist_plan.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/megatron/parameter_names.h"
#include "engine/megatron/pickle_writer.h"
#include "engine/megatron/torch_archive_writer.h"

namespace mbridge {
namespace {

// Blocks are read whole by every rank that needs a part of them.
constexpr int64_t kMaxBlockBytes = int64_t{256} << 20;
constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";

// Where a parameter's name puts it.
struct Place {
  std::string key;
  std::vector<LeadingIndex> lead;
};

class Planner {
 public:
  Planner(const GptConfig& config, const std::vector<PlannedParameter>& parameters, int64_t file_bytes)
      : config_(config), parameters_(parameters), file_bytes_(file_bytes), stacked_(LayersAreAlike()) {}

  TorchDistPlan Plan(const std::string& common) {
    PlanObjects(common);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      for (const Place& place : PlacesOf(parameters_[i].name)) AddParameter(i, place);
    }
    return std::move(plan_);
  }

 private:
  // As Megatron-Core decides, which stacks unless the layers are said to differ; and every layer must have the same parameters.
  bool LayersAreAlike() const {
    if (!config_.moe_layer_freq.empty()) return false;
    std::map<int64_t, std::set<std::pair<std::string, std::string>>> layers;
    for (const PlannedParameter& parameter : parameters_) {
      int64_t layer = 0;
      size_t rest = 0;
      if (SplitLayerName(parameter.name, &layer, &rest))
        layers[layer].insert(
            {parameter.name.substr(rest), fmt::format("{}{}", NameOf(parameter.dtype), parameter.shape.ToString())});
    }
    return static_cast<int64_t>(layers.size()) == config_.num_layers &&
           std::all_of(layers.begin(), layers.end(), [&](const auto& layer) { return layer.second == layers.begin()->second; });
  }

  Place PlaceOf(int64_t layer, const WrittenName& name) const {
    Place place;
    if (stacked_) place.lead.push_back({layer, config_.num_layers});
    if (name.expert >= 0) place.lead.push_back({name.expert, config_.num_moe_experts});
    place.key = stacked_ ? "decoder.layers." + name.rest : fmt::format("decoder.layers.{}.{}", layer, name.rest);
    return place;
  }
  std::vector<Place> PlacesOf(const std::string& ours) const {
    int64_t layer = 0;
    size_t rest = 0;
    if (!SplitLayerName(ours, &layer, &rest)) return {{ours, {}}};
    std::vector<Place> places;
    for (const WrittenName& name : WrittenNames(ours.substr(rest), config_.multi_latent_attention, IsMoeLayer(config_, layer)))
      places.push_back(PlaceOf(layer, name));
    return places;
  }

  // Extra states of modules, all empty: the loader asks for those of its own implementation. Which modules have one depends on
  // it; here every module of a layer and the last norm have.
  void PlanObjects(const std::string& common) {
    std::set<std::string> keys;
    for (const PlannedParameter& parameter : parameters_) {
      for (const Place& place : PlacesOf(parameter.name)) {
        const std::string module = place.key.substr(0, place.key.rfind('.'));
        const bool fused = place.key.find(".layer_norm_") != std::string::npos;
        const bool inside =
            module.starts_with("decoder.") && !module.ends_with("mlp.router") && !module.ends_with("shared_experts");
        if (inside && !fused) keys.insert(ObjectKey(module, place.lead));
      }
    }
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const Place place = PlaceOf(layer, {"self_attention.core_attention"});
      keys.insert(ObjectKey(place.key, place.lead));
    }
    const std::string nothing = ArchiveOfObject(PickleWriter().BeginList().None().EndList().Finish());
    AddObject("common_state/shard_0_1", ArchiveOfObject(common));
    for (const std::string& key : keys) AddObject(key, nothing);
  }
  static std::string ObjectKey(const std::string& module, const std::vector<LeadingIndex>& lead) {
    std::vector<int64_t> indices, counts;
    for (const LeadingIndex& index : lead) {
      indices.push_back(index.index);
      counts.push_back(index.count);
    }
    if (lead.empty()) return module + "._extra_state/shard_0_1";
    return fmt::format("{}._extra_state/shard_{}_{}", module, absl::StrJoin(indices, "."), absl::StrJoin(counts, "."));
  }
  void AddObject(const std::string& key, std::string archive) {
    if (plan_.file_bytes.empty()) plan_.file_bytes.push_back(0);
    plan_.objects.push_back({key, std::move(archive), plan_.file_bytes[0]});
    plan_.file_bytes[0] += static_cast<int64_t>(plan_.objects.back().archive.size());
  }

  void AddParameter(size_t index, const Place& place) {
    const PlannedParameter& parameter = parameters_[index];
    const size_t tensor = TensorFor(place, parameter);
    const int64_t rows = parameter.shape[0],
                  bytes = parameter.shape.NumElements() * static_cast<int64_t>(SizeOf(parameter.dtype));
    const int64_t row_bytes = std::max<int64_t>(bytes / std::max<int64_t>(rows, 1), 1);
    const int64_t most = std::max<int64_t>(kMaxBlockBytes / row_bytes, 1);
    for (int64_t first = 0; first < rows; first += most) {
      PlannedBlock block{.parameter = index, .first_row = first, .offsets = {}, .sizes = {}, .tensor = tensor};
      for (const LeadingIndex& lead : place.lead) {
        block.offsets.push_back(lead.index);
        block.sizes.push_back(1);
      }
      for (int axis = 0; axis < parameter.shape.rank(); ++axis) {
        block.offsets.push_back(axis == 0 ? first : 0);
        block.sizes.push_back(axis == 0 ? std::min(most, rows - first) : parameter.shape[axis]);
      }
      const TensorFrame frame = FrameOfTensor(parameter.dtype, block.sizes, 0);
      const int64_t block_bytes = block.sizes[place.lead.size()] * row_bytes;
      block.length = static_cast<int64_t>(frame.before.size() + frame.after.size()) + block_bytes;
      if (plan_.file_bytes.empty() || plan_.file_bytes.back() >= file_bytes_) plan_.file_bytes.push_back(0);
      block.file = plan_.file_bytes.size() - 1;
      block.offset = plan_.file_bytes.back();
      plan_.file_bytes.back() += block.length;
      plan_.tensor_bytes += block_bytes;
      plan_.tensors[tensor].blocks.push_back(plan_.blocks.size());
      plan_.blocks.push_back(std::move(block));
    }
  }
  size_t TensorFor(const Place& place, const PlannedParameter& parameter) {
    const auto [found, is_new] = tensor_by_key_.insert({place.key, plan_.tensors.size()});
    if (is_new) {
      PlannedTensor tensor{.key = place.key, .dtype = parameter.dtype, .shape = {}, .blocks = {}};
      for (const LeadingIndex& lead : place.lead) tensor.shape.push_back(lead.count);
      for (int axis = 0; axis < parameter.shape.rank(); ++axis) tensor.shape.push_back(parameter.shape[axis]);
      plan_.tensors.push_back(std::move(tensor));
    }
    return found->second;
  }

  const GptConfig& config_;
  const std::vector<PlannedParameter>& parameters_;
  const int64_t file_bytes_;
  const bool stacked_;
  TorchDistPlan plan_;
  std::map<std::string, size_t> tensor_by_key_;
};

void WriteSize(const std::vector<int64_t>& sizes, PickleWriter* pickle) {
  pickle->Global("torch", "Size").BeginTuple().BeginTuple();
  for (const int64_t size : sizes) pickle->Int(size);
  pickle->EndTuple().EndTuple().Call();
}

void WriteTensor(const TorchDistPlan& plan, const PlannedTensor& tensor, PickleWriter* pickle) {
  pickle->Text(tensor.key).NewObject(kMetadataModule, "TensorStorageMetadata").BeginDict();
  // dtype, layout, requires_grad, memory format, pin_memory
  pickle->Text("properties").NewObject(kMetadataModule, "TensorProperties").BeginTuple();
  pickle->Global("torch", TorchDtypeName(tensor.dtype));
  pickle->Global("torch.serialization", "_get_layout").BeginTuple().Text("torch.strided").EndTuple().Call();
  pickle->Bool(false);
  pickle->Global(kMetadataModule, "_MEM_FORMAT_ENCODING").BeginTuple().Int(0).EndTuple().Call();
  pickle->Bool(false).EndTuple().SetState();
  pickle->Text("size");
  WriteSize(tensor.shape, pickle);
  pickle->Text("chunks").BeginList();
  for (const size_t index : tensor.blocks) {
    pickle->NewObject(kMetadataModule, "ChunkStorageMetadata").BeginDict().Text("offsets");
    WriteSize(plan.blocks[index].offsets, pickle);
    pickle->Text("sizes");
    WriteSize(plan.blocks[index].sizes, pickle);
    pickle->EndDict().SetState();
  }
  pickle->EndList().EndDict().SetState();
}

void WritePlace(const std::string& key, const std::vector<int64_t>* offsets, size_t file, int64_t offset, int64_t length,
                PickleWriter* pickle) {
  pickle->NewObject(kMetadataModule, "MetadataIndex").BeginDict().Text("fqn").Text(key).Text("offset");
  if (offsets == nullptr) {
    pickle->None();
  } else {
    WriteSize(*offsets, pickle);
  }
  pickle->Text("index").None().EndDict().SetState();
  pickle->NewObject("torch.distributed.checkpoint.filesystem", "_StorageInfo").BeginDict();
  pickle->Text("relative_path").Text(DataFileName(file)).Text("offset").Int(offset).Text("length").Int(length);
  pickle->EndDict().SetState();
}

}  // namespace

std::string DataFileName(size_t file) { return fmt::format("__0_{}.distcp", file); }

TorchDistPlan PlanTorchDist(const GptConfig& config, const std::vector<PlannedParameter>& parameters, const std::string& common,
                            int64_t file_bytes) {
  return Planner(config, parameters, file_bytes).Plan(common);
}

std::string MetadataOf(const TorchDistPlan& plan) {
  PickleWriter pickle;
  pickle.NewObject(kMetadataModule, "Metadata").BeginDict().Text("state_dict_metadata").BeginDict();
  for (const PlannedTensor& tensor : plan.tensors) WriteTensor(plan, tensor, &pickle);
  for (const PlannedObject& object : plan.objects)
    pickle.Text(object.key).NewObject(kMetadataModule, "BytesStorageMetadata").BeginDict().EndDict().SetState();
  pickle.EndDict().Text("planner_data").None().Text("storage_data").BeginDict();
  for (const PlannedTensor& tensor : plan.tensors) {
    for (const size_t index : tensor.blocks) {
      const PlannedBlock& block = plan.blocks[index];
      WritePlace(tensor.key, &block.offsets, block.file, block.offset, block.length, &pickle);
    }
  }
  for (const PlannedObject& object : plan.objects)
    WritePlace(object.key, nullptr, 0, object.offset, static_cast<int64_t>(object.archive.size()), &pickle);
  pickle.EndDict().Text("storage_meta").None().EndDict().SetState();
  return pickle.Finish();
}

}  // namespace mbridge
