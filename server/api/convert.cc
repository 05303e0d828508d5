#include "server/api/convert.h"

#include <fmt/format.h>

#include <algorithm>

#include "server/nodes/rank_specs.h"

namespace mbridge::server {
namespace {

bool IsModelName(const std::string& text) {
  const size_t slash = text.find('/');
  return slash != std::string::npos && slash > 0 && text.find('/', slash + 1) == std::string::npos && slash + 1 < text.size() &&
         text[0] != '.';
}

bool BeneathOne(const std::string& path, const std::vector<std::string>& roots) {
  return std::any_of(roots.begin(), roots.end(), [&](const std::string& root) { return IsBeneath(path, root); });
}

}  // namespace

std::vector<FieldViolation> CheckConvertFields(const v1::JobSpec& spec, bool validate_only) {
  std::vector<FieldViolation> wrong;
  const v1::ConvertSpec& convert = spec.convert();
  const bool import = convert.action() == v1::CONVERT_ACTION_IMPORT;
  const bool recipe = convert.action() == v1::CONVERT_ACTION_RECIPE;
  const bool known =
      import || recipe || convert.action() == v1::CONVERT_ACTION_EXPORT || convert.action() == v1::CONVERT_ACTION_VERIFY;
  if (!known) wrong.push_back({"spec.convert.action", "is not import, export, verify or recipe"});
  if (recipe && !validate_only) wrong.push_back({"spec.convert.action", "recipe is an answer, not a job: set validate_only"});
  if (!spec.recipe().empty() || !spec.config_yaml().empty() || spec.overrides_size() > 0) {
    wrong.push_back({"spec.recipe", "a conversion has no recipe, configuration file or overrides"});
  }
  const bool megatron = !convert.megatron().empty();
  if (megatron && !convert.hugging_face().empty()) {
    wrong.push_back({"spec.convert.megatron", "and hugging_face are both given: give one of them"});
  } else if (megatron && !convert.megatron().starts_with('/')) {
    wrong.push_back({"spec.convert.megatron", fmt::format("'{}' is not an absolute path", convert.megatron())});
  }
  const std::string& model = convert.hugging_face();
  const bool may_be_name = convert.action() != v1::CONVERT_ACTION_EXPORT;
  const bool needs_model = !(convert.list_tensors() && convert.action() == v1::CONVERT_ACTION_EXPORT);
  if (needs_model && !megatron && !model.starts_with('/') && !(may_be_name && IsModelName(model))) {
    wrong.push_back(
        {"spec.convert.hugging_face", fmt::format("'{}' is not an absolute path{}", model, may_be_name ? " or org/name" : "")});
  }
  if (import && spec.run_name().empty())
    wrong.push_back({"spec.run_name", "an import needs the run that gets the checkpoint: --to NAME"});
  const bool from_model = import || recipe;
  if (from_model != (spec.start().mode() != v1::START_MODE_FORK)) {
    wrong.push_back({"spec.start.mode",
                     from_model ? "is fresh for an import" : "is fork, with the checkpoint to convert: --from CHECKPOINT"});
  }
  const std::string& dtype = convert.dtype();
  if (!dtype.empty() && dtype != "bf16" && dtype != "fp16" && dtype != "fp32") {
    wrong.push_back({"spec.convert.dtype", fmt::format("'{}' is not bf16, fp16 or fp32", dtype)});
  }
  const auto not_negative = [&](const char* field, int64_t value) {
    if (value < 0) wrong.push_back({field, fmt::format("is {}: at least 0", value)});
  };
  not_negative("spec.convert.vocab_multiple", convert.vocab_multiple());
  not_negative("spec.convert.vocab_size", convert.vocab_size());
  not_negative("spec.convert.shard_bytes", convert.shard_bytes());
  return wrong;
}

absl::Status PrepareConvert(const ConvertRoots& roots, v1::Job* job) {
  v1::JobSpec* spec = job->mutable_spec();
  v1::ConvertSpec* convert = spec->mutable_convert();
  std::vector<std::string> readable;
  if (!roots.data_roots.empty()) {
    readable = roots.data_roots;
    readable.insert(readable.end(), roots.checkpoint_roots.begin(), roots.checkpoint_roots.end());
  }
  std::vector<FieldViolation> outside;
  const auto check = [&](const char* field, const std::string& path, const std::vector<std::string>& allowed) {
    if (path.empty() || BeneathOne(path, allowed)) return;
    outside.push_back({field, fmt::format("{} is in none of the roots {}; choose a path there", path, fmt::join(allowed, ", "))});
  };
  const auto check_read = [&](const char* field, const std::string& path) {
    if (!readable.empty() && path.starts_with('/')) check(field, path, readable);
  };
  if (convert->action() == v1::CONVERT_ACTION_EXPORT) {
    check("spec.convert.hugging_face", convert->hugging_face(), roots.checkpoint_roots);
    check("spec.convert.megatron", convert->megatron(), roots.checkpoint_roots);
  } else {
    check_read("spec.convert.hugging_face", convert->hugging_face());
    check_read("spec.convert.megatron", convert->megatron());
  }
  check_read("spec.convert.like", convert->like());
  check_read("spec.convert.logits", convert->logits());
  if (!outside.empty()) return InvalidFields(v1::REASON_PATH_OUTSIDE_ROOTS, outside);

  convert->clear_allowed_roots();
  for (const std::string& root : readable) convert->add_allowed_roots(root);
  spec->set_device(v1::DEVICE_CPU);
  spec->set_ranks(1);
  job->mutable_resolved()->set_ranks(1);
  job->mutable_resolved()->set_recipe("convert");
  job->set_run_directory(roots.checkpoint_roots.front() + "/" + job->run_name());
  return absl::OkStatus();
}

}  // namespace mbridge::server
