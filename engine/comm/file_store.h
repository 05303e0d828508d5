// Gloo's rendezvous store over a folder: a key is a file, written once by rename. In its name every byte but letters, digits,
// '-' and '_' is %XX (the agents, which relay such folders between nodes, spell keys the same way).
#pragma once

#include <string>
#include <vector>

#include <gloo/rendezvous/store.h>

namespace mbridge {

// Waiting polls, because the folder may lie on a network file system or be fed by an agent. Throws EngineError
// COLLECTIVE_TIMEOUT when a key does not appear in time, ENGINE_ERROR when the folder cannot be used. Thread-safe.
class FileStore : public gloo::rendezvous::Store {
 public:
  // Keys of another `group` in the same folder are other keys. Makes the folder if its parent exists.
  FileStore(std::string directory, std::string group, double timeout_seconds);

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::string PathOf(const std::string& key) const;

  std::string directory_, group_;
  std::chrono::milliseconds timeout_;
};

}  // namespace mbridge
