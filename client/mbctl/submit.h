// Starting jobs: submit, resume, fork.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace mbridge::mbctl {

class Session;

void AddSubmit(CLI::App* app, Session* session);
void AddResume(CLI::App* app, Session* session);
void AddFork(CLI::App* app, Session* session);

// `later` after `earlier`; an earlier line of the same key is left out, since two values of one key are an
// error. Other ways to write a key are the same key.
std::vector<std::string> MergeOverrides(const std::vector<std::string>& earlier, const std::vector<std::string>& later);

}  // namespace mbridge::mbctl
