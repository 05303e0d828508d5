#include "tests/e2e/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

extern char** environ;

namespace mbridge::e2e {
namespace {

std::vector<std::string> MergedEnvironment(const std::map<std::string, std::string>& extra) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!extra.contains(text.substr(0, text.find('=')))) merged.push_back(text);
  }
  for (const auto& [name, value] : extra) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::filesystem::path TemporaryFile(const std::string& content) {
  std::string name = (std::filesystem::temp_directory_path() / "mb-e2e-io-XXXXXX").string();
  const int fd = mkstemp(name.data());
  if (fd < 0) throw std::runtime_error("mkstemp " + name);
  close(fd);
  if (!content.empty()) WriteFile(name, content);
  return name;
}

}  // namespace

std::string CommandResult::Text() const {
  std::ostringstream text;
  text << "exit code " << exit_code << (signal != 0 ? ", signal " + std::to_string(signal) : "")
       << (timed_out ? ", timed out" : "") << "\n-- stdout --\n"
       << out << "\n-- stderr --\n"
       << err;
  return text.str();
}

Process::Process(const std::vector<std::string>& arguments, const SpawnOptions& options) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  std::filesystem::path input = "/dev/null";
  if (!options.input.empty()) input = TemporaryFile(options.input);
  posix_spawn_file_actions_addopen(&actions, 0, input.c_str(), O_RDONLY, 0);
  const std::string out = options.out_path.empty() ? "/dev/null" : options.out_path.string();
  const std::string err = options.err_path.empty() ? "/dev/null" : options.err_path.string();
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (!options.directory.empty()) posix_spawn_file_actions_addchdir_np(&actions, options.directory.c_str());
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  if (options.new_session) posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);

  std::vector<std::string> arguments_copy = arguments;
  std::vector<std::string> environment = MergedEnvironment(options.environment);
  const int error = posix_spawnp(&pid_, arguments.front().c_str(), &actions, &attributes, Pointers(arguments_copy).data(),
                                 Pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (!options.input.empty()) std::filesystem::remove(input);
  if (error != 0) throw std::runtime_error("cannot start " + arguments.front() + ": " + std::strerror(error));
  ended_ = false;
}

Process::Process(Process&& other) noexcept { *this = std::move(other); }

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(ended_, other.ended_);
  std::swap(exit_code_, other.exit_code_);
  std::swap(signal_, other.signal_);
  return *this;
}

Process::~Process() {
  if (ended_) return;
  Signal(SIGKILL);
  Reap(true);
}

bool Process::Reap(bool block) {
  if (ended_) return true;
  int status = 0;
  if (waitpid(pid_, &status, block ? 0 : WNOHANG) != pid_) return false;
  ended_ = true;
  if (WIFEXITED(status)) exit_code_ = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) signal_ = WTERMSIG(status);
  return true;
}

bool Process::running() { return !Reap(false); }

void Process::Signal(int signal) {
  if (!ended_) kill(pid_, signal);
}

bool Process::Wait(Seconds timeout) {
  return WaitUntil([this] { return Reap(false); }, timeout);
}

CommandResult RunCommand(const std::vector<std::string>& arguments, SpawnOptions options, Seconds timeout) {
  options.out_path = TemporaryFile("");
  options.err_path = TemporaryFile("");
  CommandResult result;
  {
    Process process(arguments, options);
    if (!process.Wait(timeout)) {
      result.timed_out = true;
      process.Signal(SIGKILL);
      process.Wait(Seconds(10));
    }
    result.exit_code = process.exit_code();
    result.signal = process.signal();
  }
  result.out = ReadFile(options.out_path);
  result.err = ReadFile(options.err_path);
  std::filesystem::remove(options.out_path);
  std::filesystem::remove(options.err_path);
  return result;
}

bool WaitUntil(const std::function<bool()>& condition, Seconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteFile(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

std::string ProgramOf(pid_t pid) {
  std::error_code error;
  const auto target = std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error);
  return error ? "" : target.filename().string();
}

std::string CommandLineOf(pid_t pid) {
  std::string text = ReadFile("/proc/" + std::to_string(pid) + "/cmdline");
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

std::vector<pid_t> ProcessesWithEnvironment(const std::string& name, const std::string& value) {
  const std::string wanted = std::string(1, '\0') + name + "=" + value + std::string(1, '\0');
  std::vector<pid_t> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string file = entry.path().filename();
    if (file.find_first_not_of("0123456789") != std::string::npos) continue;
    // A zombie has no readable environment, so it does not count.
    const std::string environment = std::string(1, '\0') + ReadFile(entry.path() / "environ");
    if (environment.find(wanted) != std::string::npos) pids.push_back(std::stoi(file));
  }
  return pids;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("no free port");
  }
  close(fd);
  return ntohs(address.sin_port);
}

}  // namespace mbridge::e2e
