#include "worker/rank/convert_command.h"

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include <google/protobuf/text_format.h>

#include "absl/strings/str_join.h"
#include "engine/bridge/conversion.h"
#include "engine/megatron/conversion.h"
#include "engine/train/model_keys.h"
#include "engine/train/throw_status.h"
#include "engine/train/training_plan.h"
#include "proto/format/training_line.h"
#include "proto/rpc/status_details.h"
#include "proto/rpc/version.h"
#include "recipes/config/word_option.h"
#include "worker/rank/model_recipe.h"
#include "worker/rank/preflight.h"
#include "worker/rank/rank_run.h"

namespace mbridge {
namespace {

constexpr const char* kImportedName = "step_00000000";
const std::map<std::string, DType> kTypes = {{"fp32", DType::kF32}, {"bf16", DType::kBF16}, {"fp16", DType::kF16}};

constexpr const char* kCheckpointField = "spec.start.checkpoint_id";

// Of a status that names none: something is wrong with foreign files.
v1::Reason ReasonWithout(const absl::Status& status) {
  if (absl::IsNotFound(status)) return v1::REASON_INVALID_REQUEST;
  return absl::IsDataLoss(status) ? v1::REASON_DATA_ERROR : v1::REASON_CHECKPOINT_IO_ERROR;
}

// As ValueOrThrow, with reasons for what is wrong with foreign files.
template <class T> T Take(absl::StatusOr<T> value) {
  const absl::Status& status = value.status();
  if (!status.ok() && ReasonOf(status) == v1::REASON_UNSPECIFIED) {
    throw EngineError(ReasonWithout(status), std::string(status.message()));
  }
  return ValueOrThrow(std::move(value));
}

// Options of a conversion as fields of the request that asked for it; keys of config.json and paths stay.
absl::Status InFieldsOfRequest(const absl::Status& status) {
  std::vector<FieldViolation> violations = FieldViolationsOf(status);
  if (violations.empty()) return status;
  const google::protobuf::Descriptor* fields = v1::ConvertSpec::descriptor();
  for (FieldViolation& violation : violations) {
    if (violation.field == "checkpoint") violation.field = kCheckpointField;
    if (fields->FindFieldByName(violation.field) != nullptr) violation.field = "spec.convert." + violation.field;
  }
  return InvalidFields(ReasonOf(status), violations);
}

std::optional<DType> TypeNamed(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const auto found = kTypes.find(name);
  if (found == kTypes.end())
    ThrowIfError(InvalidFields(v1::REASON_INVALID_REQUEST, {{"dtype", fmt::format("is \"{}\": fp32, bf16 or fp16", name)}}));
  return found->second;
}

// "12.3 GB"
std::string Bytes(int64_t bytes) {
  if (bytes >= 1'000'000'000) return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9);
  if (bytes >= 1'000'000) return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
  return fmt::format("{} kB", (bytes + 999) / 1000);
}

std::string Plural(int64_t count, const char* what) { return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s"); }

// The keys of an imported model, as the configuration of its checkpoint; also those that a recipe would say otherwise.
std::string ConfigTextOf(const GptConfig& model) {
  v1::ConfigContainer config;
  v1::ModelConfig& keys = *config.mutable_model();
  keys = ModelKeys(model);
  keys.set_bias_activation_fusion(model.bias_activation_fusion);
  keys.set_bias_dropout_fusion(model.bias_dropout_fusion);
  keys.set_cross_entropy_loss_fusion(model.cross_entropy_loss_fusion);
  keys.set_attention_softmax_in_fp32(model.attention_softmax_in_fp32);
  keys.set_hidden_dropout(model.hidden_dropout);
  keys.set_attention_dropout(model.attention_dropout);
  std::string text;
  google::protobuf::TextFormat::PrintToString(config, &text);
  return text;
}

bool HasSourceRecord(const std::string& checkpoint) {
  std::error_code error;
  return std::filesystem::exists(fmt::format("{}/{}", checkpoint, kHuggingFaceFolder), error);
}

// The model of a checkpoint as its configuration says; none when it does not tell, or was imported with its config.json beside
// it.
std::optional<GptConfig> ConfiguredModel(const std::string& checkpoint, const std::string& manifest_hash) {
  const CheckpointMeta meta = Take(ReadCheckpointMeta(checkpoint, manifest_hash));
  if (meta.step == 0 && HasSourceRecord(checkpoint)) return std::nullopt;
  v1::ConfigContainer config;
  if (!google::protobuf::TextFormat::ParseFromString(meta.config_text, &config)) return std::nullopt;
  const absl::StatusOr<GptConfig> model = ModelOf(config);
  return model.ok() ? std::optional(*model) : std::nullopt;
}

ImportOptions ToImport(const v1::RankSpec& spec) {
  ImportOptions options;
  options.source = spec.convert().hugging_face();
  options.path = fmt::format("{}/{}", spec.checkpoint_directory(), kImportedName);
  options.roots.assign(spec.convert().allowed_roots().begin(), spec.convert().allowed_roots().end());
  options.dtype = TypeNamed(spec.convert().dtype());
  options.vocab_multiple = spec.convert().vocab_multiple() == 0 ? 1 : spec.convert().vocab_multiple();
  options.meta.run_name = spec.run_name();
  options.meta.job_id = spec.job_id();
  options.meta.attempt = spec.attempt();
  options.meta.build_id = BuildId();
  options.config_text = ConfigTextOf;
  return options;
}

ExportOptions ToExport(const v1::RankSpec& spec) {
  const v1::ConvertSpec& convert = spec.convert();
  ExportOptions options;
  options.checkpoint = spec.load_checkpoint_path();
  options.manifest_hash = spec.expected_manifest_hash();
  options.path = convert.hugging_face();
  options.like = convert.like();
  // An ancestor that came from Megatron-LM has no config.json.
  if (ReadCheckpointMeta(options.like).ok() && !HasSourceRecord(options.like)) options.like.clear();
  options.model_type = convert.model_type();
  options.roots.assign(spec.convert().allowed_roots().begin(), spec.convert().allowed_roots().end());
  options.dtype = TypeNamed(convert.dtype());
  options.vocab_size = convert.vocab_size();
  if (convert.shard_bytes() > 0) options.shard_bytes = convert.shard_bytes();
  options.model = ConfiguredModel(options.checkpoint, options.manifest_hash);
  return options;
}

MegatronImportOptions ToMegatronImport(const v1::RankSpec& spec) {
  const ImportOptions common = ToImport(spec);
  MegatronImportOptions options;
  options.source = spec.convert().megatron();
  options.path = common.path;
  options.roots = common.roots;
  options.like = spec.convert().like();
  options.dtype = common.dtype;
  options.meta = common.meta;
  options.config_text = common.config_text;
  return options;
}

MegatronExportOptions ToMegatronExport(const v1::RankSpec& spec) {
  MegatronExportOptions options;
  options.checkpoint = spec.load_checkpoint_path();
  options.manifest_hash = spec.expected_manifest_hash();
  options.path = spec.convert().megatron();
  options.dtype = TypeNamed(spec.convert().dtype());
  options.model = ConfiguredModel(options.checkpoint, options.manifest_hash);
  return options;
}

absl::StatusOr<ConversionPlan> PlanOf(const v1::RankSpec& spec) {
  const bool megatron = !spec.convert().megatron().empty();
  if (spec.convert().action() == v1::CONVERT_ACTION_IMPORT)
    return megatron ? PlanMegatronImport(ToMegatronImport(spec)) : PlanImport(ToImport(spec));
  return megatron ? PlanMegatronExport(ToMegatronExport(spec)) : PlanExport(ToExport(spec));
}

absl::StatusOr<SavedCheckpoint> ImportTo(const std::string& path, const v1::RankSpec& spec, const ConversionObserver& observer) {
  if (!spec.convert().megatron().empty()) {
    MegatronImportOptions options = ToMegatronImport(spec);
    options.path = path;
    return RunMegatronImport(options, observer);
  }
  ImportOptions options = ToImport(spec);
  options.path = path;
  return RunImport(options, observer);
}

// Tells about progress at the start, then at most every few seconds.
class ProgressLines {
 public:
  ProgressLines(std::string what, std::function<void(const std::string&)> tell, double interval)
      : what_(std::move(what)), tell_(std::move(tell)), interval_(interval) {}

  void operator()(const ConversionProgress& progress) {
    const auto now = std::chrono::steady_clock::now();
    if (begin_bytes_ < 0) begin_bytes_ = progress.bytes;
    const bool done = progress.tensors == progress.total_tensors;
    if (told_ && !done && std::chrono::duration<double>(now - last_).count() < interval_) return;
    told_ = true;
    last_ = now;
    std::string line = fmt::format("{}: {} of {} tensors, {} of {}", what_, progress.tensors, progress.total_tensors,
                                   Bytes(progress.bytes), Bytes(progress.total_bytes));
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    const double rate = static_cast<double>(progress.bytes - begin_bytes_) / std::max(seconds, 1e-3);
    if (seconds > 1.0 && rate > 0 && !done) {
      line += fmt::format(", {}/s, {} left", Bytes(static_cast<int64_t>(rate)),
                          FormatDuration(static_cast<double>(progress.total_bytes - progress.bytes) / rate));
    }
    tell_(line);
  }

 private:
  std::string what_;
  std::function<void(const std::string&)> tell_;
  double interval_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now(), last_;
  int64_t begin_bytes_ = -1;
  bool told_ = false;
};

std::vector<std::string> Summary(const ConversionPlan& plan) {
  std::vector<std::string> lines = {fmt::format(
      "model_type {}, {} parameters, vocabulary of {}{}", plan.model_type, plan.parameters, plan.vocab_size,
      plan.model.padded_vocab_size > plan.vocab_size ? fmt::format(" padded to {}", plan.model.padded_vocab_size) : "")};
  lines.push_back(fmt::format("{} of {} become {} of {}", Plural(static_cast<int64_t>(plan.source.size()), "tensor"),
                              Bytes(plan.source_bytes), Plural(static_cast<int64_t>(plan.result.size()), "tensor"),
                              Bytes(plan.result_bytes)));
  for (const std::string& note : plan.notes) lines.push_back("note: " + note);
  for (const std::string& skipped : plan.skipped) lines.push_back("skipped: " + skipped);
  return lines;
}

std::vector<std::string> TensorLines(const ConversionPlan& plan) {
  std::vector<std::string> lines;
  for (const ListedTensor& tensor : plan.source) {
    lines.push_back(fmt::format("{:<8} {:<20} {:>12}  {}{}", tensor.dtype, fmt::format("[{}]", absl::StrJoin(tensor.shape, ", ")),
                                tensor.bytes, tensor.name, tensor.used_by.empty() ? "" : " -> " + tensor.used_by));
  }
  return lines;
}

std::string VerifyOutcome(const VerifiedConversion& verified) {
  std::string text = fmt::format("{} of {} compared", Plural(verified.tensors, "tensor"), Bytes(verified.bytes));
  if (verified.logits_difference) text += fmt::format(", logits differ by {:.1e} of the largest", *verified.logits_difference);
  if (verified.different.empty()) return text + ": equal bit for bit";
  const size_t shown = std::min<size_t>(verified.different.size(), 10);
  return fmt::format(
      "{}: {} differ: {}{}", text, verified.different.size(),
      absl::StrJoin(std::vector<std::string>(verified.different.begin(), verified.different.begin() + shown), ", "),
      shown < verified.different.size() ? ", ..." : "");
}

v1::RankResult Import(const v1::RankSpec& spec, EventSink* sink, const ConversionObserver& observer) {
  const SavedCheckpoint saved = Take(ImportTo(ToImport(spec).path, spec, observer));
  v1::Checkpoint checkpoint;
  checkpoint.set_run_name(spec.run_name());
  checkpoint.set_job_id(spec.job_id());
  checkpoint.set_attempt(spec.attempt());
  checkpoint.set_path(saved.path);
  checkpoint.set_bytes(saved.bytes);
  checkpoint.set_manifest_hash(saved.manifest_hash);
  sink->CheckpointWritten(checkpoint);
  v1::RankResult result;
  result.set_reason(v1::REASON_COMPLETED);
  result.set_detail(fmt::format("imported {} to {}", Plural(saved.tensors, "tensor"), saved.path));
  return result;
}

v1::RankResult Export(const v1::RankSpec& spec, const ConversionObserver& observer) {
  const bool megatron = !spec.convert().megatron().empty();
  const ExportedModel exported =
      Take(megatron ? RunMegatronExport(ToMegatronExport(spec), observer) : RunExport(ToExport(spec), observer));
  v1::RankResult result;
  result.set_reason(v1::REASON_COMPLETED);
  result.set_detail(
      fmt::format("exported {} in {} to {}", Plural(exported.tensors, "tensor"), Plural(exported.files, "file"), exported.path));
  return result;
}

VerifiedConversion CompareWithMegatron(const v1::RankSpec& spec, const ConversionObserver& observer) {
  MegatronVerifyOptions options;
  options.checkpoint = spec.load_checkpoint_path();
  options.manifest_hash = spec.expected_manifest_hash();
  options.source = spec.convert().megatron();
  options.like = spec.convert().like();
  options.logits = spec.convert().logits();
  options.roots.assign(spec.convert().allowed_roots().begin(), spec.convert().allowed_roots().end());
  return Take(VerifyMegatronConversion(options, observer));
}

VerifiedConversion CompareWithHuggingFace(const v1::RankSpec& spec, const ConversionObserver& observer) {
  VerifyConversionOptions options;
  options.checkpoint = spec.load_checkpoint_path();
  options.manifest_hash = spec.expected_manifest_hash();
  options.source = spec.convert().hugging_face();
  options.roots.assign(spec.convert().allowed_roots().begin(), spec.convert().allowed_roots().end());
  options.logits = spec.convert().logits();
  return Take(VerifyConversion(options, observer));
}

v1::RankResult Verify(const v1::RankSpec& spec, const ConversionObserver& observer) {
  const VerifiedConversion verified =
      spec.convert().megatron().empty() ? CompareWithHuggingFace(spec, observer) : CompareWithMegatron(spec, observer);
  v1::RankResult result;
  const bool logits_differ = verified.logits_difference.value_or(0.0) > 1e-4;
  result.set_reason(verified.different.empty() && !logits_differ ? v1::REASON_COMPLETED : v1::REASON_DATA_ERROR);
  result.set_detail(VerifyOutcome(verified));
  return result;
}

const char* NameOf(v1::ConvertAction action) {
  if (action == v1::CONVERT_ACTION_IMPORT) return "import";
  return action == v1::CONVERT_ACTION_EXPORT ? "export" : "verify";
}

class TerminalSink : public EventSink {
 public:
  void Started(const v1::RankStarted&) override {}
  void Metric(const v1::MetricPoint&) override {}
  void CheckpointWritten(const v1::Checkpoint&) override {}
  void Message(const std::string& text) override { std::fprintf(stderr, "%s\n", text.c_str()); }
};

}  // namespace

v1::RankResult RunConversion(const v1::RankSpec& spec, EventSink* sink, const std::atomic<bool>* stop) {
  constexpr double kSecondsBetweenLines = 5.0;
  const v1::ConvertAction action = spec.convert().action();
  ProgressLines lines(
      NameOf(action), [sink](const std::string& line) { sink->Message(line); }, kSecondsBetweenLines);
  const ConversionObserver observer{.progress = std::ref(lines), .stop = stop};
  v1::RankResult result;
  switch (action) {
    case v1::CONVERT_ACTION_IMPORT: result = Import(spec, sink, observer); break;
    case v1::CONVERT_ACTION_EXPORT: result = Export(spec, observer); break;
    case v1::CONVERT_ACTION_VERIFY: result = Verify(spec, observer); break;
    default: throw EngineError(v1::REASON_INVALID_REQUEST, "convert.action is not import, export or verify");
  }
  sink->Message(result.detail());
  return result;
}

void CheckConversion(const v1::RankSpec& spec, v1::PreflightResult* result) {
  const v1::ConvertAction action = spec.convert().action();
  const char* const model_field = spec.convert().megatron().empty() ? "spec.convert.hugging_face" : "spec.convert.megatron";
  if (action == v1::CONVERT_ACTION_RECIPE) {
    const AllowedRoots roots(spec.convert().allowed_roots().begin(), spec.convert().allowed_roots().end());
    const absl::StatusOr<std::string> recipe = RecipeOfModel(spec.convert().hugging_face(), roots, 0);
    if (recipe.ok())
      result->set_config_yaml(*recipe);
    else
      AddProblems(recipe.status(), model_field, ReasonWithout(recipe.status()), result);
    return;
  }
  const bool import = action == v1::CONVERT_ACTION_IMPORT;
  if (!import && action != v1::CONVERT_ACTION_EXPORT) return;  // Verifying reads both sides whole anyway.
  const absl::StatusOr<ConversionPlan> plan = PlanOf(spec);
  if (!plan.ok()) {
    AddProblems(InFieldsOfRequest(plan.status()), import ? model_field : kCheckpointField, ReasonWithout(plan.status()), result);
    return;
  }
  if (spec.convert().list_tensors()) {
    for (const std::string& line : TensorLines(*plan)) result->add_facts(line);
  }
  for (const std::string& line : Summary(*plan)) result->add_facts(line);
}

struct ConvertCommand::Flags {
  v1::ConvertSpec spec;
  std::string hugging_face, megatron, checkpoint, dtype, like, model_type, logits, path;
  int64_t vocab_multiple = 1, vocab_size = 0, shard_bytes = 0, seq_length = 0;
  bool dry_run = false;
};

ConvertCommand::ConvertCommand(CLI::App* app) : flags_(std::make_unique<Flags>()) {
  Flags* flags = flags_.get();
  CLI::App* convert = app->add_subcommand(
      "convert", "Hugging Face models and Megatron-LM checkpoints to checkpoints and back, without a coordinator");
  convert->require_subcommand(1);
  const auto add_type = [flags](CLI::App* command) {
    command->add_option("--dtype", flags->dtype, "Type of the floating-point tensors; default: as in the source")
        ->check(recipes::OneOf({"fp32", "bf16", "fp16"}));
    command->add_flag("--dry-run", flags->dry_run, "Check everything and tell what would be done");
  };
  const auto add_model = [flags](CLI::App* command, const char* hugging_face, const char* megatron) {
    auto* model = command->add_option_group("model")->require_option(1);
    model->add_option("--hf", flags->hugging_face, hugging_face)->type_name("DIR");
    model->add_option("--megatron", flags->megatron, megatron)->type_name("DIR");
  };
  import_ = convert->add_subcommand("import", "Hugging Face model or Megatron-LM checkpoint to a checkpoint");
  add_model(import_, "Directory, or org/name of the local hub cache", "Megatron-LM checkpoint, torch_dist or torch");
  import_->add_option("--like", flags->like, "With --megatron: Hugging Face model whose config.json says what the model is");
  import_->add_option("--to", flags->checkpoint, "New checkpoint directory")->required();
  import_->add_option("--vocab-multiple", flags->vocab_multiple, "Pad the vocabulary with zero rows to a multiple")
      ->check(CLI::PositiveNumber);
  add_type(import_);
  export_ = convert->add_subcommand("export", "Checkpoint to a Hugging Face model or a Megatron-LM checkpoint");
  export_->add_option("--from", flags->checkpoint, "Checkpoint directory")->required();
  add_model(export_, "New directory", "New directory, of a Megatron-LM checkpoint in the torch_dist format");
  export_->add_option("--like", flags->like,
                      "Model or imported checkpoint that gives config.json and tokenizer; default: the checkpoint itself");
  export_->add_option("--model-type", flags->model_type, "Family, for a checkpoint that was not imported and without --like");
  export_->add_option("--vocab-size", flags->vocab_size, "Rows of the vocabulary without padding; default: those of the source")
      ->check(CLI::PositiveNumber);
  export_->add_option("--shard-bytes", flags->shard_bytes, "Largest data file; default 5000000000")->check(CLI::PositiveNumber);
  add_type(export_);
  verify_ = convert->add_subcommand("verify", "Compare a checkpoint with the model that it was imported from, bit for bit");
  verify_->add_option("--from", flags->checkpoint, "Checkpoint directory")->required();
  add_model(verify_, "Directory, or org/name of the local hub cache", "Megatron-LM checkpoint, torch_dist or torch");
  verify_->add_option("--like", flags->like, "With --megatron: as for import");
  verify_->add_option("--logits", flags->logits,
                      "safetensors with input_ids [b, s] and logits [b, s, vocabulary] to compare with too");
  inspect_ = convert->add_subcommand("inspect", "Tensors, types, sizes and the mapping that a conversion would use");
  inspect_->add_option("path", flags->path, "Hugging Face directory, org/name, Megatron-LM checkpoint, or checkpoint directory")
      ->required();
  inspect_->add_option("--like", flags->like, "As for export");
  recipe_ = convert->add_subcommand("recipe", "The model as a configuration file for mbctl submit --config");
  recipe_->add_option("--hf", flags->hugging_face, "Directory, or org/name of the local hub cache")->required();
  recipe_->add_option("--seq-length", flags->seq_length, "Length of a sample; default: max_position_embeddings, at most 4096")
      ->check(CLI::PositiveNumber);
}

ConvertCommand::~ConvertCommand() = default;

int ConvertCommand::Run() {
  Flags& flags = *flags_;
  const v1::RankResult outcome = ResultOf([&] {
    v1::RankSpec spec;
    v1::ConvertSpec& convert = *spec.mutable_convert();
    convert.set_hugging_face(flags.hugging_face);
    convert.set_megatron(flags.megatron);
    convert.set_action(export_->parsed() ? v1::CONVERT_ACTION_EXPORT : v1::CONVERT_ACTION_IMPORT);
    convert.set_dtype(flags.dtype);
    convert.set_vocab_multiple(flags.vocab_multiple);
    convert.set_like(flags.like);
    convert.set_model_type(flags.model_type);
    convert.set_vocab_size(flags.vocab_size);
    convert.set_shard_bytes(flags.shard_bytes);
    convert.set_logits(flags.logits);
    spec.set_load_checkpoint_path(flags.checkpoint);
    v1::RankResult done;
    done.set_reason(v1::REASON_COMPLETED);
    if (recipe_->parsed()) {
      std::printf("%s", Take(RecipeOfModel(flags.hugging_face, {}, flags.seq_length)).c_str());
      return done;
    }
    if (inspect_->parsed()) {
      const bool is_checkpoint = ReadCheckpointMeta(flags.path).ok();
      if (is_checkpoint) {
        convert.set_action(v1::CONVERT_ACTION_EXPORT);
        spec.set_load_checkpoint_path(flags.path);
      } else if (LooksLikeMegatron(flags.path)) {
        convert.set_megatron(flags.path);
      } else {
        convert.set_hugging_face(flags.path);
      }
      const ConversionPlan plan = Take(PlanOf(spec));
      for (const std::string& line : TensorLines(plan)) std::printf("%s\n", line.c_str());
      for (const std::string& line : Summary(plan)) std::printf("%s\n", line.c_str());
      return done;
    }
    TerminalSink sink;
    ProgressLines lines(
        import_->parsed()   ? "import"
        : export_->parsed() ? "export"
                            : "verify",
        [&sink](const std::string& line) { sink.Message(line); }, 1.0);
    const ConversionObserver observer{.progress = std::ref(lines), .stop = InstallStopHandler()};
    if (verify_->parsed()) {
      done = Verify(spec, observer);
    } else if (flags.dry_run) {
      for (const std::string& line : Summary(Take(PlanOf(spec)))) std::printf("%s\n", line.c_str());
      return done;
    } else if (import_->parsed()) {
      const SavedCheckpoint saved = Take(ImportTo(flags.checkpoint, spec, observer));
      done.set_detail(fmt::format("imported {} to {}", Plural(saved.tensors, "tensor"), saved.path));
    } else {
      done = Export(spec, observer);
    }
    std::printf("%s\n", done.detail().c_str());
    return done;
  });
  if (outcome.reason() == v1::REASON_COMPLETED) return 0;
  if (!verify_->parsed() || outcome.reason() != v1::REASON_DATA_ERROR) {
    std::fprintf(stderr, "mbrank convert: %s: %s\n", ReasonName(outcome.reason()).c_str(), outcome.detail().c_str());
  }
  return ExitCodeOf(outcome.reason());
}

}  // namespace mbridge
