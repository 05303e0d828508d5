#include "engine/comm/file_store.h"

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

#include "engine/core/error.h"

namespace mbridge {

FileStore::FileStore(std::string directory, std::string group, double timeout_seconds)
    : directory_(std::move(directory)), group_(std::move(group)), timeout_(static_cast<int64_t>(timeout_seconds * 1000)) {
  if (mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) {
    ThrowEngineError("cannot create the rendezvous folder {}: {}", directory_, std::strerror(errno));
  }
}

std::string FileStore::PathOf(const std::string& key) const {
  std::string name;
  for (const char c : group_ + "/" + key) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte < 0x80 && (std::isalnum(byte) != 0 || byte == '-' || byte == '_');
    name += plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return directory_ + "/" + name;
}

void FileStore::set(const std::string& key, const std::vector<char>& data) {
  const std::string path = PathOf(key);
  const std::string temporary = fmt::format("{}.tmp-{}", path, getpid());
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(data.data(), static_cast<std::streamsize>(data.size()));
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error_number = errno;
    unlink(temporary.c_str());
    ThrowEngineError("cannot write the rendezvous file {}: {}", path, std::strerror(error_number));
  }
}

std::vector<char> FileStore::get(const std::string& key) {
  wait({key});
  std::ifstream in(PathOf(key), std::ios::binary);
  if (!in) ThrowEngineError("cannot read the rendezvous file {}", PathOf(key));
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void FileStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void FileStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  auto pause = std::chrono::milliseconds(1);
  for (const std::string& key : keys) {
    while (access(PathOf(key).c_str(), R_OK) != 0) {
      if (std::chrono::steady_clock::now() >= deadline) {
        throw EngineError(v1::REASON_COLLECTIVE_TIMEOUT, fmt::format("group {}: no rank published \"{}\" in {} within {} s",
                                                                     group_, key, directory_, timeout.count() / 1000.0));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
  }
}

}  // namespace mbridge
