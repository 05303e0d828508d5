#include "engine/core/failpoint.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <map>
#include <mutex>
#include <string>

namespace mbridge {
namespace {

struct Action {
  enum class Kind : uint8_t { kKill, kError, kSleep } kind = Kind::kKill;
  long value = 0;
  long only_pass = 0;  // 0: every pass.
  long passes = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Action> actions;
};

std::atomic<int> g_state{-1};  // -1: environment not read, 0: no failpoint set, 1: look up.

Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

// "kill", "error:28@3", "sleep:500"; false when malformed.
bool ParseAction(std::string text, Action* action) {
  if (const size_t at = text.find('@'); at != std::string::npos) {
    action->only_pass = std::atol(text.c_str() + at + 1);
    text.resize(at);
  }
  const size_t colon = text.find(':');
  const std::string verb = text.substr(0, colon);
  if (colon != std::string::npos) action->value = std::atol(text.c_str() + colon + 1);
  if (verb == "kill")
    action->kind = Action::Kind::kKill;
  else if (verb == "error")
    action->kind = Action::Kind::kError;
  else if (verb == "sleep")
    action->kind = Action::Kind::kSleep;
  else
    return false;
  return true;
}

void Load() {
  Registry& registry = GetRegistry();
  std::lock_guard lock(registry.mutex);
  registry.actions.clear();
  const char* value = std::getenv("MB_FAILPOINTS");
  std::string text = value == nullptr ? "" : value;
  while (!text.empty()) {
    const size_t end = text.find(';');
    const std::string entry = text.substr(0, end);
    text = end == std::string::npos ? "" : text.substr(end + 1);
    const size_t equals = entry.find('=');
    Action action;
    if (equals != std::string::npos && ParseAction(entry.substr(equals + 1), &action)) {
      registry.actions[entry.substr(0, equals)] = action;
    }
  }
  g_state.store(registry.actions.empty() ? 0 : 1, std::memory_order_release);
}

}  // namespace

void ReloadFailpoints() { Load(); }

int Failpoint(const char* name) {
  int state = g_state.load(std::memory_order_acquire);
  if (state == 0) [[likely]]
    return 0;
  if (state < 0) {
    Load();
    if (g_state.load(std::memory_order_acquire) == 0) return 0;
  }
  Action action;
  {
    Registry& registry = GetRegistry();
    std::lock_guard lock(registry.mutex);
    const auto it = registry.actions.find(name);
    if (it == registry.actions.end()) return 0;
    ++it->second.passes;
    if (it->second.only_pass != 0 && it->second.passes != it->second.only_pass) return 0;
    action = it->second;
  }
  switch (action.kind) {
    case Action::Kind::kKill: std::raise(SIGKILL); return 0;
    case Action::Kind::kError: return static_cast<int>(action.value);
    case Action::Kind::kSleep: {
      const timespec wait{action.value / 1000, action.value % 1000 * 1000000};
      nanosleep(&wait, nullptr);
      return 0;
    }
  }
  return 0;
}

}  // namespace mbridge
