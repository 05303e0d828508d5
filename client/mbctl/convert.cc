// convert: Hugging Face models to checkpoints and back, as jobs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <ostream>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/follow.h"
#include "client/mbctl/model_recipe.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "recipes/config/word_option.h"

namespace mbridge::mbctl {
namespace {

constexpr std::string_view kNotePrefix = "note: ";

struct ConvertFlags {
  v1::ConvertSpec convert;
  std::string name, from, request_id;
  bool dry_run = false;
  FollowFlags follow;
};

std::string Absolute(const std::string& path) {
  return path.empty() ? path : std::filesystem::absolute(path).lexically_normal().string();
}

v1::CreateJobRequest MakeRequest(const ConvertFlags& flags) {
  v1::CreateJobRequest request;
  v1::JobSpec& spec = *request.mutable_spec();
  spec.set_kind(v1::JOB_KIND_CONVERT);
  spec.set_run_name(flags.name);
  *spec.mutable_convert() = flags.convert;
  if (!flags.from.empty()) {
    spec.mutable_start()->set_mode(v1::START_MODE_FORK);
    spec.mutable_start()->set_weights_only(true);
    spec.mutable_start()->set_checkpoint_id(flags.from);
  }
  request.set_request_id(flags.request_id.empty() ? client::MakeRequestId() : flags.request_id);
  request.set_validate_only(flags.dry_run);
  return request;
}

int Start(Session* session, const ConvertFlags& flags) {
  MBCTL_ASSIGN_OR_FAIL(FollowOptions follow, *session, ToFollowOptions(flags.follow));
  MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
  const v1::CreateJobRequest request = MakeRequest(flags);
  const auto created = client->CreateJob(request);
  if (!created.ok()) return session->Fail(created.status());
  const v1::Job& job = created->job();
  if (flags.dry_run) {
    return session->Print(job.resolved(), job.run_name(), [&] {
      std::string text;
      for (const std::string& line : job.resolved().warnings()) {
        text += (line.starts_with(kNotePrefix) ? line.substr(kNotePrefix.size()) : line) + "\n";
      }
      return text;
    });
  }
  session->Say(
      fmt::format("{} {} (run {})", created->already_existed() ? "this request made job" : "job", job.job_id(), job.run_name()));
  if (!flags.follow.follow && !flags.follow.wait) {
    session->Print(job, job.job_id(), [&] { return job.job_id() + "\n"; });
    session->Say(fmt::format("watch it: mbctl follow {}", job.job_id()));
    return client::kExitOk;
  }
  if (session->format == "name") session->out << job.job_id() << std::endl;
  return FollowJob(session, job.job_id(), follow);
}

void AddCommonFlags(CLI::App* command, ConvertFlags* flags) {
  command->add_flag("--dry-run", flags->dry_run, "Check everything and tell what would be done, start nothing");
  command->add_option("--request-id", flags->request_id, "UUID of this request: the same id again returns the first job");
  AddFollowFlags(command, &flags->follow, true);
}

void AddType(CLI::App* command, std::string* dtype) {
  command->add_option("--dtype", *dtype, "Type of the floating-point tensors; default: as in the source")
      ->check(recipes::OneOf({"fp32", "bf16", "fp16"}));
}

// What the options of one command fill; protobuf strings cannot be bound to options.
struct Words {
  std::string hugging_face, megatron, dtype, like, model_type, logits;
  int64_t vocab_multiple = 0, vocab_size = 0, shard_bytes = 0;
};

// The foreign side: one of the two.
void AddModel(CLI::App* command, Words* words, const char* hugging_face, const char* megatron) {
  auto* model = command->add_option_group("model", "One of these")->require_option(1);
  model->add_option("--hf", words->hugging_face, hugging_face)->type_name("DIR");
  model->add_option("--megatron", words->megatron, megatron)->type_name("DIR");
}

constexpr const char* kHuggingFaceSource = "Directory on the node, or org/name of its hub cache";
constexpr const char* kMegatronSource =
    "Megatron-LM checkpoint on the node, format torch_dist or torch: the folder above iter_..., or one";

void AddImport(CLI::App* convert, Session* session) {
  auto flags = std::make_shared<ConvertFlags>();
  auto words = std::make_shared<Words>();
  auto* command = convert->add_subcommand(
      "import", "Hugging Face model or Megatron-LM checkpoint to checkpoint NAME@0, from which runs can fork");
  AddModel(command, words.get(), kHuggingFaceSource, kMegatronSource);
  command
      ->add_option(
          "--like", words->like,
          "With --megatron: Hugging Face model whose config.json says what the model is, in place of the run's arguments")
      ->type_name("DIR");
  command->add_option("--to", flags->name, "Run that gets the checkpoint")->required()->type_name("NAME");
  command->add_option("--vocab-multiple", words->vocab_multiple, "Pad the vocabulary with zero rows to a multiple")
      ->check(CLI::PositiveNumber);
  AddType(command, &words->dtype);
  AddCommonFlags(command, flags.get());
  command->callback([=] {
    session->action = [=]() -> int {
      flags->convert.set_action(v1::CONVERT_ACTION_IMPORT);
      flags->convert.set_hugging_face(AbsoluteModel(words->hugging_face));
      flags->convert.set_megatron(Absolute(words->megatron));
      flags->convert.set_like(Absolute(words->like));
      flags->convert.set_dtype(words->dtype);
      flags->convert.set_vocab_multiple(words->vocab_multiple);
      return Start(session, *flags);
    };
  });
}

void AddExport(CLI::App* convert, Session* session) {
  auto flags = std::make_shared<ConvertFlags>();
  auto words = std::make_shared<Words>();
  auto* command = convert->add_subcommand(
      "export", "Checkpoint to a Hugging Face model that transformers loads, or to a Megatron-LM checkpoint");
  command->add_option("--from", flags->from, "Checkpoint id, RUN@STEP")->required()->type_name("CKPT");
  AddModel(command, words.get(), "New directory, in a checkpoint root of the coordinator",
           "The same, of a Megatron-LM checkpoint in the format torch_dist");
  command
      ->add_option("--like", words->like,
                   "Model directory that gives config.json and tokenizer; default: what the run was imported from")
      ->type_name("DIR");
  command->add_option("--model-type", words->model_type, "Family, where nothing was imported and there is no --like")
      ->type_name("TYPE");
  command->add_option("--vocab-size", words->vocab_size, "Rows of the vocabulary without padding")->check(CLI::PositiveNumber);
  command->add_option("--shard-bytes", words->shard_bytes, "Largest data file; default 5000000000")->check(CLI::PositiveNumber);
  AddType(command, &words->dtype);
  AddCommonFlags(command, flags.get());
  command->callback([=] {
    session->action = [=]() -> int {
      flags->convert.set_action(v1::CONVERT_ACTION_EXPORT);
      flags->convert.set_hugging_face(Absolute(words->hugging_face));
      flags->convert.set_megatron(Absolute(words->megatron));
      flags->convert.set_like(Absolute(words->like));
      flags->convert.set_model_type(words->model_type);
      flags->convert.set_dtype(words->dtype);
      flags->convert.set_vocab_size(words->vocab_size);
      flags->convert.set_shard_bytes(words->shard_bytes);
      return Start(session, *flags);
    };
  });
}

void AddVerify(CLI::App* convert, Session* session) {
  auto flags = std::make_shared<ConvertFlags>();
  auto words = std::make_shared<Words>();
  auto* command = convert->add_subcommand("verify", "Compare a checkpoint with the model that it came from, bit for bit");
  command->add_option("--from", flags->from, "Checkpoint id, RUN@STEP")->required()->type_name("CKPT");
  AddModel(command, words.get(), kHuggingFaceSource, kMegatronSource);
  command->add_option("--like", words->like, "With --megatron: as for import")->type_name("DIR");
  command->add_option("--logits", words->logits, "safetensors with input_ids and logits to compare with too")->type_name("FILE");
  AddCommonFlags(command, flags.get());
  command->callback([=] {
    session->action = [=]() -> int {
      flags->convert.set_action(v1::CONVERT_ACTION_VERIFY);
      flags->convert.set_hugging_face(AbsoluteModel(words->hugging_face));
      flags->convert.set_megatron(Absolute(words->megatron));
      flags->convert.set_like(Absolute(words->like));
      flags->convert.set_logits(Absolute(words->logits));
      return Start(session, *flags);
    };
  });
}

void AddInspect(CLI::App* convert, Session* session) {
  auto flags = std::make_shared<ConvertFlags>();
  auto words = std::make_shared<Words>();
  auto* command =
      convert->add_subcommand("inspect", "Tensors, types, sizes and the mapping that a conversion would use; starts nothing");
  auto* source = command->add_option_group("source", "One of these")->require_option(1);
  source->add_option("--hf", words->hugging_face, kHuggingFaceSource)->type_name("DIR");
  source->add_option("--megatron", words->megatron, kMegatronSource)->type_name("DIR");
  source->add_option("--from", flags->from, "Checkpoint id, RUN@STEP")->type_name("CKPT");
  command->add_option("--like", words->like, "With --from: as for export; with --megatron: as for import")->type_name("DIR");
  command->callback([=] {
    session->action = [=]() -> int {
      if (!words->hugging_face.empty() && !words->like.empty()) return session->Usage("--like goes with --from or --megatron");
      flags->dry_run = true;
      flags->convert.set_list_tensors(true);
      if (flags->from.empty()) {
        flags->convert.set_action(v1::CONVERT_ACTION_IMPORT);
        flags->convert.set_hugging_face(AbsoluteModel(words->hugging_face));
        flags->convert.set_megatron(Absolute(words->megatron));
        flags->convert.set_like(Absolute(words->like));
        flags->name = "inspect-" + client::MakeRequestId();
      } else {
        flags->convert.set_action(v1::CONVERT_ACTION_EXPORT);
        flags->convert.set_like(Absolute(words->like));
      }
      return Start(session, *flags);
    };
  });
}

}  // namespace

void AddConvert(CLI::App* app, Session* session) {
  auto* convert =
      app->add_subcommand("convert", "Hugging Face models and Megatron-LM checkpoints to checkpoints and back, as jobs");
  convert->require_subcommand(1);
  AddImport(convert, session);
  AddExport(convert, session);
  AddVerify(convert, session);
  AddInspect(convert, session);
  convert->footer(
      "Examples:\n"
      "  mbctl convert import --hf /models/llama --to base --wait\n"
      "  mbctl submit --hf /models/llama --start fork --from base@0 --weights-only -n tuned\n"
      "  mbctl convert export --from tuned@1000 --hf /checkpoints/tuned-hf --wait\n"
      "  mbctl convert import --megatron /checkpoints/gpt --to gpt --wait");
}

}  // namespace mbridge::mbctl
