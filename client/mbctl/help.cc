#include "client/mbctl/help.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>
#include <vector>

#include "client/lib/exit_code.h"
#include "client/mbctl/app.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "proto/rpc/status_details.h"
#include "proto/rpc/version.h"
#include "recipes/config/schema.h"

namespace mbridge::mbctl {
namespace {

std::vector<v1::Reason> Reasons() {
  std::vector<v1::Reason> reasons;
  const auto* descriptor = v1::Reason_descriptor();
  for (int i = 0; i < descriptor->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(descriptor->value(i)->number());
    if (reason != v1::REASON_UNSPECIFIED) reasons.push_back(reason);
  }
  return reasons;
}

// Reasons that only say why a job waits end nothing.
bool Ends(v1::Reason reason) { return reason == v1::REASON_COMPLETED || InfoOf(reason).exit_code() != 0; }

std::string ReasonsOf(int code, const char* separator) {
  std::string text;
  for (const v1::Reason reason : Reasons()) {
    if (!Ends(reason) || InfoOf(reason).exit_code() != code) continue;
    text += (text.empty() ? "" : separator) + ReasonName(reason);
  }
  return text;
}

std::string RetryText(v1::RetryRule rule) {
  switch (rule) {
    case v1::RETRY_RULE_FROM_CHECKPOINT: return "tried again from the last checkpoint, counted against --max-restarts";
    case v1::RETRY_RULE_INFRASTRUCTURE: return "tried again from the last checkpoint, not the job's fault";
    case v1::RETRY_RULE_NEVER: return "not tried again";
    default: return "";
  }
}

std::string Upper(std::string text) {
  for (char& c : text) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string Describe(v1::Reason reason) {
  const v1::ReasonInfo& info = InfoOf(reason);
  std::string text = fmt::format("{}\n  {}\n", ReasonName(reason), info.help());
  if (Ends(reason)) text += fmt::format("  exit code {}\n", info.exit_code());
  if (const std::string retry = RetryText(info.retry()); !retry.empty()) text += fmt::format("  {}\n", retry);
  return text;
}

}  // namespace

std::string ExitCodesText() {
  Table table({"CODE", "MEANING", "REASONS"});
  for (const auto& entry : client::ExitCodes())
    table.Add({fmt::format("{}", entry.code), entry.meaning, ReasonsOf(entry.code, " ")});
  return table.Text();
}

std::string ExitCodesMarkdown() {
  std::string text = "| code | meaning | reasons |\n|---|---|---|\n";
  for (const auto& entry : client::ExitCodes()) {
    text += fmt::format("| {} | {} | {} |\n", entry.code, entry.meaning, ReasonsOf(entry.code, ", "));
  }
  return text;
}

absl::StatusOr<std::string> ErrorsText(const std::string& reason) {
  std::string text;
  if (reason.empty()) {
    for (const v1::Reason each : Reasons()) text += Describe(each);
    return text;
  }
  const std::string wanted = StripPrefix(Upper(reason), "REASON_");
  std::string similar;
  for (const v1::Reason each : Reasons()) {
    if (ReasonName(each) == wanted) return Describe(each);
    if (ReasonName(each).find(wanted) != std::string::npos) similar += (similar.empty() ? "" : ", ") + ReasonName(each);
  }
  return absl::NotFoundError(fmt::format("there is no reason {}{}", wanted,
                                         similar.empty() ? "; `mbctl help errors` lists them" : "; similar: " + similar));
}

void AddHelp(CLI::App* app, Session* session) {
  auto topics = std::make_shared<std::vector<std::string>>();
  auto* help = app->add_subcommand("help", "Help on a command, `help exit-codes`, `help errors [REASON]`");
  help->add_option("TOPIC", *topics, "Command words, exit-codes, or errors [REASON]");
  help->callback([=] {
    session->action = [=]() -> int {
      const std::string first = topics->empty() ? "" : topics->front();
      if (first == "exit-codes") {
        session->out << ExitCodesText() << std::flush;
        return client::kExitOk;
      }
      if (first == "errors") {
        MBCTL_ASSIGN_OR_FAIL(const std::string text, *session, ErrorsText(topics->size() > 1 ? (*topics)[1] : ""));
        session->out << text << std::flush;
        return client::kExitOk;
      }
      const CLI::App* command = app;
      std::string path = app->get_name();
      for (const std::string& word : *topics) {
        const auto found = command->get_subcommands([&](const CLI::App* child) { return child->get_name() == word; });
        if (found.empty()) {
          return session->Usage(fmt::format("there is no help on '{}'{}\nnext: {} --help", word,
                                            recipes::DidYouMean(word, CommandNames(*command)), path));
        }
        command = found.front();
        path += " " + word;
      }
      // App::help would go on to the parsed subcommand, which is `help` itself.
      session->out << command->get_formatter()->make_help(command, path, CLI::AppFormatMode::Normal) << std::flush;
      return client::kExitOk;
    };
  });

  auto* version = app->add_subcommand("version", "Version of mbctl; of the coordinator: mbctl admin info");
  version->callback([=] {
    session->action = [=] {
      if (session->json()) {
        session->out << fmt::format("{{\"version\": \"{}\", \"buildId\": \"{}\"}}\n", VersionString(), BuildId());
      } else {
        session->out << VersionLine("mbctl") << std::endl;
      }
      return client::kExitOk;
    };
  });
}

}  // namespace mbridge::mbctl
