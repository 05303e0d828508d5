#include "server/store/keys.h"

#include <fmt/format.h>

#include <cctype>

namespace mbridge::server::keys {

void AppendBigEndian(std::string* key, uint64_t value, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) key->push_back(static_cast<char>(value >> shift & 0xff));
}

uint64_t ReadBigEndian(std::string_view bytes) {
  uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<unsigned char>(byte);
  return value;
}

std::string Plain(char table, std::string_view id) { return fmt::format("{}{}", table, id); }

std::string Prefix(char table, std::string_view id) {
  std::string key = Plain(table, id);
  key.push_back('\0');
  return key;
}

std::string Event(std::string_view job_id, int64_t sequence) {
  std::string key = Prefix(kEvent, job_id);
  AppendBigEndian(&key, static_cast<uint64_t>(sequence), 8);
  return key;
}

std::string MetricSuffix(const v1::MetricPoint& point) {
  std::string suffix;
  AppendBigEndian(&suffix, static_cast<uint32_t>(point.attempt()), 4);
  AppendBigEndian(&suffix, static_cast<uint64_t>(point.step()), 8);
  AppendBigEndian(&suffix, point.final_pass() ? 1 : 0, 1);
  AppendBigEndian(&suffix, static_cast<uint64_t>(point.kind()), 1);
  return suffix;
}

std::string RunIndex(const v1::Checkpoint& checkpoint) {
  std::string key = Prefix(kRunIndex, checkpoint.run_name());
  const auto& time = checkpoint.commit_time();
  AppendBigEndian(&key, static_cast<uint64_t>(time.seconds()) * 1'000'000 + time.nanos() / 1000, 8);
  return key + checkpoint.checkpoint_id();
}

std::string Outbox(std::string_view node_id, std::string_view task_id) { return Prefix(kOutbox, node_id).append(task_id); }

std::string Acknowledged(std::string_view job_id, int32_t attempt) {
  std::string key = Prefix(kAcknowledged, job_id);
  AppendBigEndian(&key, static_cast<uint32_t>(attempt), 4);
  return key;
}

std::string Describe(std::string_view key) {
  std::string text;
  for (const char byte : key) {
    const auto code = static_cast<unsigned char>(byte);
    if (std::isprint(code)) {
      text.push_back(byte);
    } else {
      text += fmt::format("\\x{:02x}", code);
    }
  }
  return text;
}

}  // namespace mbridge::server::keys
