// One function per command group; each adds its subcommands to the program and sets session->action when one is chosen.
#pragma once

namespace CLI {
class App;
}

namespace mbridge::mbctl {

class Session;

void AddJobs(CLI::App* app, Session* session);         // ps, get, describe, cancel
void AddLogs(CLI::App* app, Session* session);         // logs
void AddMetrics(CLI::App* app, Session* session);      // metrics
void AddCheckpoints(CLI::App* app, Session* session);  // ckpt ls|get|verify|pin|unpin|rm
void AddRecipes(CLI::App* app, Session* session);      // recipe ls|show|keys
void AddNodes(CLI::App* app, Session* session);        // node ls|drain|undrain
void AddCompare(CLI::App* app, Session* session);      // compare
void AddTranslate(CLI::App* app, Session* session);    // translate
void AddAdmin(CLI::App* app, Session* session);        // admin info|shutdown
void AddData(CLI::App* app, Session* session);         // data
void AddBench(CLI::App* app, Session* session);        // bench
void AddConvert(CLI::App* app, Session* session);      // convert import|export|verify|inspect
// These look at the whole program, so they come last.
void AddCompletion(CLI::App* app, Session* session);  // completion bash|zsh|fish
void AddHelp(CLI::App* app, Session* session);        // help, version

}  // namespace mbridge::mbctl
