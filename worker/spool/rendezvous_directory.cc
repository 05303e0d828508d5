#include "worker/spool/rendezvous_directory.h"

#include <sys/stat.h>

#include <cctype>
#include <cerrno>
#include <filesystem>

#include <fmt/format.h>

#include "proto/rpc/status_details.h"
#include "worker/spool/file.h"

namespace mbridge::spool {
namespace {

constexpr size_t kMaxNameBytes = 200;

bool IsPlain(unsigned char byte) { return byte < 0x80 && (std::isalnum(byte) || byte == '-' || byte == '_'); }

std::string NameOf(const std::string& key) {
  std::string name;
  for (const unsigned char byte : key) {
    if (IsPlain(byte)) {
      name += static_cast<char>(byte);
    } else {
      name += fmt::format("%{:02X}", byte);
    }
  }
  return name;
}

// nullopt for the name of a temporary or foreign file.
std::optional<std::string> KeyOf(const std::string& name) {
  std::string key;
  for (size_t i = 0; i < name.size(); ++i) {
    if (IsPlain(static_cast<unsigned char>(name[i]))) {
      key += name[i];
    } else if (name[i] == '%' && i + 2 < name.size() && std::isxdigit(static_cast<unsigned char>(name[i + 1])) &&
               std::isxdigit(static_cast<unsigned char>(name[i + 2]))) {
      key += static_cast<char>(std::stoi(name.substr(i + 1, 2), nullptr, 16));
      i += 2;
    } else {
      return std::nullopt;
    }
  }
  return key;
}

}  // namespace

absl::StatusOr<RendezvousDirectory> RendezvousDirectory::Open(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return ErrnoStatus(errno, "cannot create " + path);
  return RendezvousDirectory(path);
}

absl::Status RendezvousDirectory::Set(const std::string& key, const std::string& value) const {
  const std::string name = NameOf(key);
  if (name.empty() || name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        fmt::format("a rendezvous key of {} bytes is not usable: 1 to {} bytes as a file name", key.size(), kMaxNameBytes));
  }
  return ReplaceFile(path_ + "/" + name, value);
}

absl::StatusOr<std::optional<std::string>> RendezvousDirectory::Get(const std::string& key) const {
  absl::StatusOr<std::string> value = ReadFile(path_ + "/" + NameOf(key));
  if (value.ok()) return std::optional<std::string>(*std::move(value));
  if (absl::IsNotFound(value.status())) return std::optional<std::string>();
  return value.status();
}

absl::StatusOr<std::vector<std::string>> RendezvousDirectory::Keys() const {
  std::vector<std::string> keys;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    if (std::optional<std::string> key = KeyOf(it->path().filename())) keys.push_back(*std::move(key));
  }
  if (error) return ErrnoStatus(error.value(), "cannot list " + path_);
  return keys;
}

}  // namespace mbridge::spool
