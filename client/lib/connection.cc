#include "client/lib/connection.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "proto/rpc/status_details.h"

namespace mbridge::client {
namespace {

constexpr const char* kDefaultAddress = "127.0.0.1:7070";
constexpr int kDefaultPort = 7070;

struct Context {
  std::optional<std::string> server, ca, cert, key;
  std::optional<bool> tls;
};

absl::Status Invalid(const std::string& message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, v1::REASON_INVALID_CONFIG, message);
}

std::string ConfigPath(const Environment& environment) {
  if (auto home = environment("XDG_CONFIG_HOME"); home && !home->empty()) return *home + "/mbctl/config.yaml";
  if (auto home = environment("HOME"); home && !home->empty()) return *home + "/.config/mbctl/config.yaml";
  return "";
}

absl::StatusOr<Context> ParseContext(const YAML::Node& node, const std::string& where) {
  static const std::set<std::string> kKeys = {"server", "tls", "ca", "cert", "key"};
  if (!node.IsMap()) return Invalid(where + ": a context is a map of server, tls, ca, cert and key");
  Context context;
  for (const auto& entry : node) {
    const auto key = entry.first.as<std::string>();
    if (!kKeys.contains(key)) {
      return Invalid(fmt::format("{}: unknown key '{}'; known are server, tls, ca, cert, key", where, key));
    }
    if (key == "tls") {
      context.tls = entry.second.as<bool>();
      continue;
    }
    auto value = entry.second.as<std::string>();
    if (key == "server") context.server = value;
    if (key == "ca") context.ca = value;
    if (key == "cert") context.cert = value;
    if (key == "key") context.key = value;
  }
  return context;
}

// The chosen context of the file; an absent default file is an empty context, an absent named one an error.
absl::StatusOr<Context> ReadContext(const std::string& path, bool path_was_named, std::optional<std::string> name) {
  if (path.empty() || !std::filesystem::exists(path)) {
    if (path_was_named) return Invalid(fmt::format("configuration file {} does not exist", path));
    if (name) return Invalid(fmt::format("context '{}' was asked for, but {} does not exist", *name, path));
    return Context();
  }
  try {
    const YAML::Node root = YAML::LoadFile(path);
    if (!name && root["current-context"]) name = root["current-context"].as<std::string>();
    if (!name) return Context();
    const YAML::Node contexts = root["contexts"];
    if (!contexts || !contexts.IsMap() || !contexts[*name]) {
      std::string known;
      if (contexts && contexts.IsMap()) {
        for (const auto& entry : contexts) known += (known.empty() ? "" : ", ") + entry.first.as<std::string>();
      }
      return Invalid(fmt::format("{} has no context '{}'; it has: {}", path, *name, known.empty() ? "none" : known));
    }
    return ParseContext(contexts[*name], fmt::format("{}, context '{}'", path, *name));
  } catch (const YAML::Exception& error) {
    return Invalid(fmt::format("{}: {}", path, error.what()));
  }
}

absl::StatusOr<std::optional<bool>> BoolFrom(const Environment& environment, const std::string& name) {
  const auto text = environment(name);
  if (!text || text->empty()) return std::optional<bool>();
  if (*text == "1" || *text == "true") return std::optional<bool>(true);
  if (*text == "0" || *text == "false") return std::optional<bool>(false);
  return Invalid(fmt::format("environment {}={}: must be 1, true, 0 or false", name, *text));
}

}  // namespace

std::string DefaultServer(const Environment& environment) {
  const std::string socket = DefaultStateDirectory(environment) + "/coordinator.sock";
  struct stat info {};
  if (stat(socket.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) return "unix:" + socket;
  return kDefaultAddress;
}

std::string NormalizeServer(const std::string& server) {
  if (server.starts_with("unix:") || server.starts_with("dns:") || server.starts_with("ipv4:") || server.starts_with("ipv6:")) {
    return server;
  }
  if (server.starts_with("/")) return "unix:" + server;
  if (server.starts_with(":")) return "127.0.0.1" + server;
  const bool bare_ipv6 = server.ends_with("]");
  if (bare_ipv6 || server.find(':') == std::string::npos) return fmt::format("{}:{}", server, kDefaultPort);
  return server;
}

absl::StatusOr<ConnectionOptions> LoadConnectionOptions(const ConnectionFlags& flags, const Environment& environment) {
  const auto first = [&](const std::optional<std::string>& flag, const char* variable,
                         const std::optional<std::string>& file) -> std::optional<std::string> {
    if (flag) return flag;
    if (auto value = environment(variable); value && !value->empty()) return value;
    return file;
  };
  const auto named_path = first(flags.config_file, "MBCTL_CONFIG", std::nullopt);
  const auto context_name = first(flags.context, "MBCTL_CONTEXT", std::nullopt);
  MB_ASSIGN_OR_RETURN(const Context context,
                      ReadContext(named_path.value_or(ConfigPath(environment)), named_path.has_value(), context_name));
  MB_ASSIGN_OR_RETURN(const std::optional<bool> tls_variable, BoolFrom(environment, "MBCTL_TLS"));

  ConnectionOptions options;
  const auto server = first(flags.server, "MBCTL_SERVER", context.server);
  options.server = server ? NormalizeServer(*server) : DefaultServer(environment);
  options.origin = flags.server                  ? "--server"
                   : environment("MBCTL_SERVER") ? "MBCTL_SERVER"
                   : context.server              ? "the configuration file"
                                                 : "default";
  options.ca_file = first(flags.ca_file, "MBCTL_CA", context.ca).value_or("");
  options.cert_file = first(flags.cert_file, "MBCTL_CERT", context.cert).value_or("");
  options.key_file = first(flags.key_file, "MBCTL_KEY", context.key).value_or("");
  if (options.cert_file.empty() != options.key_file.empty()) {
    return Invalid("a client certificate needs both --cert and --key (MBCTL_CERT, MBCTL_KEY)");
  }
  if (const auto seconds = environment("MBCTL_RECONNECT_SECONDS"); seconds && !seconds->empty()) {
    char* rest = nullptr;
    const double value = std::strtod(seconds->c_str(), &rest);
    if (*rest != '\0' || !(value > 0) || value > 86400) {
      return Invalid(fmt::format("environment MBCTL_RECONNECT_SECONDS={}: must be a number in (0, 86400]", *seconds));
    }
    options.lost_after = std::chrono::milliseconds(static_cast<int64_t>(value * 1000));
    options.retry_for = std::min(options.retry_for, options.lost_after);
  }
  const bool implied = !options.ca_file.empty() || !options.cert_file.empty();
  options.tls = flags.tls.value_or(tls_variable.value_or(context.tls.value_or(implied)));
  if (!options.tls && implied) return Invalid("TLS is switched off, but a CA or client certificate is given");
  return options;
}

}  // namespace mbridge::client
