// Our checkpoint to Megatron-LM's torch_dist.
#include <algorithm>
#include <filesystem>
#include <set>

#include <zlib.h>

#include <fmt/format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/element_type.h"
#include "engine/bridge/output_directory.h"
#include "engine/bridge/source_record.h"
#include "engine/checkpoint/shard_reader.h"
#include "engine/core/file.h"
#include "engine/megatron/conversion.h"
#include "engine/megatron/model_arguments.h"
#include "engine/megatron/stored_model.h"
#include "engine/megatron/torch_archive_writer.h"
#include "engine/megatron/torch_dist_plan.h"

namespace mbridge {
namespace {

constexpr const char* kBackend =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1})";

absl::Status Unfit(const std::string& message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG, message);
}

// The state that is no tensor, as a dict; at the start of the pickle when `listed` within a list.
std::string CommonState(const GptConfig& config, DType dtype, int64_t iteration, bool listed) {
  PickleWriter pickle;
  if (listed) pickle.BeginList();
  pickle.BeginDict().Text("args");
  WriteArguments(config, dtype, &pickle);
  pickle.Text("checkpoint_version").Float(3.0).Text("iteration").Int(iteration);
  pickle.Text("num_floating_point_operations_so_far").Int(0);
  pickle.Text("content_metadata").BeginDict();
  pickle.Text("singleton_local_shards").Bool(false).Text("chained_optim_avoid_prefix").Bool(true).EndDict();
  pickle.EndDict();
  if (listed) pickle.EndList();
  return pickle.Finish();
}

class Exporter {
 public:
  static absl::StatusOr<std::unique_ptr<Exporter>> Open(const MegatronExportOptions& options) {
    std::unique_ptr<Exporter> exporter(new Exporter(options));
    MB_ASSIGN_OR_RETURN(exporter->manifest_, ReadManifest(options.checkpoint, options.manifest_hash));
    MB_RETURN_IF_ERROR(exporter->ChooseModel());
    MB_RETURN_IF_ERROR(exporter->ChooseTensors());
    const int64_t iteration = exporter->manifest_.manifest.meta.step;
    exporter->folder_ = iteration == 0 ? "release" : fmt::format("iter_{:07}", iteration);
    exporter->common_ = CommonState(exporter->config_, exporter->MostUsedType(), iteration, false);
    exporter->files_ = PlanTorchDist(exporter->config_, exporter->parameters_,
                                     CommonState(exporter->config_, exporter->MostUsedType(), iteration, true));
    return exporter;
  }

  ConversionPlan Plan() const {
    ConversionPlan plan;
    plan.model_type = "gpt (Megatron-LM, torch_dist)";
    plan.model = config_;
    plan.vocab_size = config_.padded_vocab_size;
    std::vector<std::string> keys(parameters_.size());
    for (const PlannedTensor& tensor : files_.tensors) {
      int64_t bytes = static_cast<int64_t>(SizeOf(tensor.dtype));
      for (const int64_t size : tensor.shape) bytes *= size;
      plan.result.push_back({tensor.key, TorchDtypeName(tensor.dtype), tensor.shape, bytes, ""});
      for (const size_t block : tensor.blocks) {
        std::string& key = keys[files_.blocks[block].parameter];
        if (!key.ends_with(tensor.key)) key += (key.empty() ? "" : ", ") + tensor.key;
      }
    }
    plan.result_bytes = files_.tensor_bytes;
    for (size_t i = 0; i < saved_.size(); ++i) {
      std::vector<int64_t> shape;
      for (int axis = 0; axis < saved_[i]->shape.rank(); ++axis) shape.push_back(saved_[i]->shape[axis]);
      const int64_t bytes = saved_[i]->shape.NumElements() * static_cast<int64_t>(SizeOf(saved_[i]->dtype));
      plan.parameters += saved_[i]->shape.NumElements();
      plan.source_bytes += bytes;
      plan.source.push_back({saved_[i]->name, std::string(NameOf(saved_[i]->dtype)), shape, bytes, keys[i]});
    }
    plan.notes.push_back("weights only: Megatron-LM loads it with --finetune, or with --no-load-optim --no-load-rng");
    if (optimizer_tensors_ > 0)
      plan.notes.push_back(fmt::format("the state of the optimizer ({} tensors) is left out", optimizer_tensors_));
    const std::vector<std::string> parts = PartsWithoutArgument(config_);
    if (!parts.empty()) {
      plan.notes.push_back(
          fmt::format("pretrain_gpt.py has no arguments for: {}; the weights are written, a model that computes the same "
                      "must be built otherwise",
                      absl::StrJoin(parts, ", ")));
    }
    return plan;
  }

  absl::StatusOr<ExportedModel> Run(const ConversionObserver& observer) {
    MB_ASSIGN_OR_RETURN(const OutputDirectory output, OutputDirectory::Open(options_.path, Fingerprint()));
    progress_.total_tensors = static_cast<int64_t>(files_.blocks.size());
    progress_.total_bytes = files_.tensor_bytes;
    int64_t missing = 0;
    for (size_t file = 0; file < files_.file_bytes.size(); ++file) {
      if (!output.Has(NameIn(DataFileName(file)))) missing += files_.file_bytes[file];
    }
    MB_RETURN_IF_ERROR(output.CheckRoom(missing));
    for (size_t file = 0; file < files_.file_bytes.size(); ++file) MB_RETURN_IF_ERROR(WriteData(output, file, observer));
    MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(NameIn("common.pt")), ArchiveOfObject(common_)));
    MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(NameIn(".metadata")), MetadataOf(files_)));
    MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(NameIn("metadata.json")), kBackend));
    const int64_t iteration = manifest_.manifest.meta.step;
    MB_RETURN_IF_ERROR(WriteFileDurably(output.PathOf(kTrackerName), iteration == 0 ? "release" : std::to_string(iteration)));
    MB_RETURN_IF_ERROR(output.Commit());
    return ExportedModel{options_.path, files_.tensor_bytes, static_cast<int>(files_.tensors.size()),
                         static_cast<int>(files_.file_bytes.size())};
  }

 private:
  explicit Exporter(const MegatronExportOptions& options) : options_(options) {}

  absl::Status ChooseModel() {
    if (options_.model) {
      config_ = *options_.model;
    } else {
      const absl::StatusOr<SourceRecord> record = ReadSourceRecord(options_.checkpoint, {});
      if (!record.ok()) {
        return Unfit(
            fmt::format("{}: neither its configuration nor a config.json beside it says what the model is", options_.checkpoint));
      }
      MB_ASSIGN_OR_RETURN(const Architecture* architecture, ArchitectureOf(record->config));
      MB_ASSIGN_OR_RETURN(config_, ReadModelConfig(*architecture, record->config));
    }
    for (const ManifestTensor& tensor : manifest_.manifest.tensors) {
      if (tensor.name == "embedding.word_embeddings.weight" && tensor.shape.rank() == 2)
        config_.padded_vocab_size = tensor.shape[0];
    }
    return absl::OkStatus();
  }

  absl::Status ChooseTensors() {
    std::map<std::string, const ManifestTensor*> saved;
    for (const ManifestTensor& tensor : manifest_.manifest.tensors) {
      if (tensor.name.starts_with(kOptimizerStatePrefix)) {
        ++optimizer_tensors_;
      } else {
        saved[tensor.name] = &tensor;
      }
    }
    MB_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> parameters, ModelParameters(config_));
    for (const ParameterSpec& parameter : parameters) {
      const auto found = saved.find(parameter.name);
      if (found == saved.end()) return Unfit(fmt::format("the checkpoint has no tensor {}, which the model has", parameter.name));
      const ManifestTensor& tensor = *found->second;
      if (tensor.shape != parameter.global_shape) {
        return Unfit(fmt::format("tensor {} has shape {} in the checkpoint and {} in the model", parameter.name,
                                 tensor.shape.ToString(), parameter.global_shape.ToString()));
      }
      const bool is_float = tensor.dtype != DType::kI32 && tensor.dtype != DType::kI64 && tensor.dtype != DType::kU8;
      parameters_.push_back({parameter.name, options_.dtype && is_float ? *options_.dtype : tensor.dtype, tensor.shape});
      saved_.push_back(&tensor);
      saved.erase(found);
    }
    if (!saved.empty()) return Unfit(fmt::format("the checkpoint has a tensor {}, which the model lacks", saved.begin()->first));
    return absl::OkStatus();
  }

  DType MostUsedType() const {
    std::map<DType, int64_t> elements;
    for (const PlannedParameter& parameter : parameters_) elements[parameter.dtype] += parameter.shape.NumElements();
    return std::max_element(elements.begin(), elements.end(), [](const auto& a, const auto& b) { return a.second < b.second; })
        ->first;
  }

  std::string Fingerprint() const {
    std::string facts = fmt::format("{};{};", manifest_.hash, folder_) + common_;
    for (const PlannedParameter& parameter : parameters_) facts += fmt::format("{},{};", parameter.name, NameOf(parameter.dtype));
    return HashText(HashOf(facts));
  }

  std::string NameIn(const std::string& file) const { return fmt::format("{}/{}", folder_, file); }

  absl::Status WriteData(const OutputDirectory& output, size_t file, const ConversionObserver& observer) {
    const std::string name = NameIn(DataFileName(file));
    if (output.Has(name)) {
      for (const PlannedBlock& block : files_.blocks) {
        if (block.file == file) Count(block);
      }
      return absl::OkStatus();
    }
    MB_ASSIGN_OR_RETURN(const std::string path, output.Begin(name));
    MB_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(path));
    if (file == 0) {
      for (const PlannedObject& object : files_.objects) MB_RETURN_IF_ERROR(writer.Write(object.archive));
    }
    for (const PlannedBlock& block : files_.blocks) {
      if (block.file != file) continue;
      MB_RETURN_IF_ERROR(CheckStop(observer));
      MB_RETURN_IF_ERROR(WriteBlock(block, &writer));
      Count(block);
      if (observer.progress != nullptr) observer.progress(progress_);
    }
    if (writer.bytes_written() != files_.file_bytes[file]) {
      return MakeStatus(absl::StatusCode::kInternal, v1::REASON_ENGINE_ERROR,
                        fmt::format("{} has {} bytes instead of {}", path, writer.bytes_written(), files_.file_bytes[file]));
    }
    MB_RETURN_IF_ERROR(writer.SyncAndClose());
    return output.Finish(name);
  }

  static int64_t BytesOf(const PlannedBlock& block, DType dtype) {
    int64_t bytes = static_cast<int64_t>(SizeOf(dtype));
    for (const int64_t size : block.sizes) bytes *= size;
    return bytes;
  }
  void Count(const PlannedBlock& block) {
    ++progress_.tensors;
    progress_.bytes += BytesOf(block, parameters_[block.parameter].dtype);
  }

  absl::Status WriteBlock(const PlannedBlock& block, FileWriter* writer) {
    const ManifestTensor& saved = *saved_[block.parameter];
    const DType dtype = parameters_[block.parameter].dtype;
    if (loaded_ != &saved) {
      loaded_ = nullptr;
      MB_RETURN_IF_ERROR(loaded_bytes_.Resize(saved.shape.NumElements() * static_cast<int64_t>(SizeOf(dtype))));
      const Part whole{saved.shape, saved.shape, -1, 0, 0, saved.shape.NumElements()};
      MB_RETURN_IF_ERROR(ReadPart(reader(), saved, whole, dtype, loaded_bytes_.data()));
      loaded_ = &saved;
    }
    const int64_t row_bytes = saved.shape.NumElements() / saved.shape[0] * static_cast<int64_t>(SizeOf(dtype));
    const char* data = loaded_bytes_.data() + block.first_row * row_bytes;
    const auto bytes = static_cast<size_t>(BytesOf(block, dtype));
    const auto checksum = static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(data), bytes));
    const TensorFrame frame = FrameOfTensor(dtype, block.sizes, checksum);
    MB_RETURN_IF_ERROR(writer->Write(frame.before));
    MB_RETURN_IF_ERROR(writer->Write(data, bytes));
    return writer->Write(frame.after);
  }

  ShardReader& reader() {
    if (reader_ == nullptr) reader_ = std::make_unique<ShardReader>(options_.checkpoint, manifest_.manifest);
    return *reader_;
  }

  const MegatronExportOptions& options_;
  ManifestWithHash manifest_;
  std::unique_ptr<ShardReader> reader_;
  GptConfig config_;
  std::vector<PlannedParameter> parameters_;
  std::vector<const ManifestTensor*> saved_;  // By parameter.
  std::string folder_, common_;
  TorchDistPlan files_;
  int64_t optimizer_tensors_ = 0;
  ConversionProgress progress_;
  const ManifestTensor* loaded_ = nullptr;
  ByteBuffer loaded_bytes_;
};

}  // namespace

absl::StatusOr<ConversionPlan> PlanMegatronExport(const MegatronExportOptions& options) {
  MB_ASSIGN_OR_RETURN(const auto exporter, Exporter::Open(options));
  return exporter->Plan();
}

absl::StatusOr<ExportedModel> RunMegatronExport(const MegatronExportOptions& options, const ConversionObserver& observer) {
  MB_ASSIGN_OR_RETURN(const auto exporter, Exporter::Open(options));
  return exporter->Run(observer);
}

}  // namespace mbridge
