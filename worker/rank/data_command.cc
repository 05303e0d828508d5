#include "worker/rank/data_command.h"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <map>

#include "engine/data/inspect.h"
#include "engine/data/preprocess.h"
#include "engine/data/tokenizer.h"
#include "recipes/config/word_option.h"

namespace mbridge {
namespace {

const std::map<std::string, TextFormat> kFormats = {
    {"auto", TextFormat::kAuto},   {"jsonl", TextFormat::kJsonLines},       {"text", TextFormat::kParagraphs},
    {"lines", TextFormat::kLines}, {"paragraphs", TextFormat::kParagraphs}, {"file", TextFormat::kWholeFile}};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "mbrank data: %s\n", std::string(status.message()).c_str());
  switch (status.code()) {
    case absl::StatusCode::kNotFound: return 3;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kOutOfRange: return 9;
    default: return 2;
  }
}

}  // namespace

DataCommand::DataCommand(CLI::App* app) {
  CLI::App* data = app->add_subcommand("data", "Prepare and check training data");
  data->require_subcommand(1);
  preprocess_ = data->add_subcommand("preprocess", "Text or JSON lines to <output>.bin and <output>.idx");
  inspect_ = data->add_subcommand("inspect", "Facts about <prefix>.bin and <prefix>.idx");
  DeclarePreprocess();
  DeclareInspect();
}

void DataCommand::DeclarePreprocess() {
  preprocess_->add_option("--input", inputs_, "Files to read, in this order")->required();
  preprocess_->add_option("--output-prefix", output_prefix_, "Writes <prefix>.bin and <prefix>.idx")->required();
  preprocess_
      ->add_option("--format", format_,
                   "auto, jsonl, text (= paragraphs), lines, paragraphs or file (a document a line, paragraph, file)")
      ->check(recipes::OneOf({"auto", "jsonl", "text", "lines", "paragraphs", "file"}));
  preprocess_->add_option("--json-key", json_key_, "Key of the text in a JSON line");
  preprocess_->add_option("--tokenizer-type", tokenizer_, "ByteLevelTokenizer, or NullTokenizer for text that is ids already");
  preprocess_->add_option("--vocab-size", vocab_size_, "Of NullTokenizer");
  preprocess_->add_flag("--no-append-eod", no_eod_, "Leave out the end-of-document token after each document");
  preprocess_->add_flag("--overwrite", overwrite_, "Replace existing output files");
}

void DataCommand::DeclareInspect() {
  inspect_->add_option("prefix", prefix_, "Path without .bin and .idx")->required();
  inspect_->add_flag("--verify", verify_, "Check everything, and read every token id");
  inspect_->add_option("--vocab-size", vocab_size_, "Ids must be below it, with --verify");
}

int DataCommand::Run() { return preprocess_->parsed() ? Preprocess() : Inspect(); }

int DataCommand::Preprocess() {
  const auto tokenizer = MakeTokenizer(tokenizer_, vocab_size_);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  PreprocessOptions options;
  options.inputs = inputs_;
  options.output_prefix = output_prefix_;
  options.format = kFormats.at(format_);
  options.json_key = json_key_;
  options.append_eod = !no_eod_;
  options.overwrite = overwrite_;
  const auto result = PreprocessText(options, **tokenizer);
  if (!result.ok()) return Fail(result.status());
  std::printf("%s: %ld documents, %ld tokens of %ld bytes of text, %ld empty documents left out\n", output_prefix_.c_str(),
              static_cast<long>(result->documents), static_cast<long>(result->tokens), static_cast<long>(result->text_bytes),
              static_cast<long>(result->empty));
  std::printf(
      "train on it with: dataset.mock=false 'dataset.data_path=[%s]' tokenizer.tokenizer_type=%s tokenizer.vocab_size=%ld\n",
      output_prefix_.c_str(), tokenizer_.c_str(), static_cast<long>((*tokenizer)->vocab_size()));
  return 0;
}

int DataCommand::Inspect() {
  const auto facts = InspectData(prefix_, verify_);
  if (!facts.ok()) return Fail(facts.status());
  for (const std::string& line : FactLines(*facts)) std::printf("%s\n", line.c_str());
  if (!verify_) return 0;
  if (const absl::Status status = VerifyData(prefix_, vocab_size_); !status.ok()) return Fail(status);
  std::printf("verified: headers, bounds, sizes%s\n", vocab_size_ > 0 ? ", every token id" : "");
  return 0;
}

}  // namespace mbridge
