#include "worker/rank/model_recipe.h"

#include <fmt/format.h>
#include <google/protobuf/text_format.h>

#include <algorithm>

#include "engine/bridge/conversion.h"
#include "engine/train/model_keys.h"
#include "engine/train/training_plan.h"
#include "proto/rpc/status_details.h"

namespace mbridge {
namespace {

constexpr int64_t kLongestDefault = 4096;

std::string YamlValue(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field) {
  const auto print = [&](int index) {
    std::string text;
    google::protobuf::TextFormat::PrintFieldValueToString(message, &field, index, &text);
    return text;
  };
  if (!field.is_repeated()) return print(-1);
  std::string list;
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) list += (i == 0 ? "" : ", ") + print(i);
  return "[" + list + "]";
}

}  // namespace

absl::StatusOr<std::string> RecipeOfModel(const std::string& directory_or_name, const AllowedRoots& roots, int64_t seq_length) {
  MB_ASSIGN_OR_RETURN(GptConfig model, ReadModelOf(directory_or_name, roots));
  if (seq_length == 0 && model.position_embedding != PositionKind::kLearnedAbsolute) {
    seq_length = std::min(model.max_position_embeddings, kLongestDefault);
  }
  const int64_t longest = model.max_position_embeddings;
  if (seq_length > 0) model.seq_length = model.max_position_embeddings = seq_length;
  v1::ConfigContainer config;
  *config.mutable_model() = ModelKeys(model);
  MB_ASSIGN_OR_RETURN(const GptConfig said, ModelOf(config));
  if (!(ModelShape(said) == ModelShape(model))) {
    return MakeStatus(
        absl::StatusCode::kUnimplemented, v1::REASON_UNSUPPORTED_MODEL,
        "the configuration has no keys yet for some parts of this model: it can be converted and verified, not trained");
  }
  std::string text =
      fmt::format("# Model of {}; its positions go up to {}.\nbase: from_hf\nmodel:\n", directory_or_name, longest);
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  config.model().GetReflection()->ListFields(config.model(), &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    if (field->name() == "vocab_size") continue;  // Follows from the tokenizer and the padding.
    text += fmt::format("  {}: {}\n", field->name(), YamlValue(config.model(), *field));
  }
  return text + fmt::format("  make_vocab_size_divisible_by: 1\ndataset:\n  seq_length: {}\ntokenizer:\n  vocab_size: {}\n",
                            model.seq_length, model.padded_vocab_size);
}

}  // namespace mbridge
