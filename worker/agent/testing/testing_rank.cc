// A rank program for tests. The run name of its specification holds what to do, as key=value words:
//   records=N interval=MS   metric records (rank 0)      log=BYTES       bytes for the log
//   end=complete|hang|silent:CODE|signal:N|reason:N              ignore_term=1   no end on SIGTERM
//   set=KEY:VALUE await=KEY                              rendezvous
//   preflight=ok|problem|crash|hang|garbage              what --preflight does
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

#include "mbridge/v1/rank.pb.h"
#include "worker/spool/attempt_directory.h"
#include "worker/spool/file.h"
#include "worker/spool/record_file.h"
#include "worker/spool/rendezvous_directory.h"

namespace mbridge {
namespace {

using Script = std::map<std::string, std::string>;

volatile sig_atomic_t terminated = 0;

Script ParseScript(const std::string& text) {
  Script script;
  std::istringstream words(text);
  for (std::string word; words >> word;) script[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  return script;
}

int Number(const Script& script, const std::string& key) {
  const auto it = script.find(key);
  return it == script.end() ? 0 : std::atoi(it->second.c_str());
}

std::string Text(const Script& script, const std::string& key) {
  const auto it = script.find(key);
  return it == script.end() ? "" : it->second;
}

int Preflight(const std::string& mode) {
  if (mode == "hang") ::pause();
  if (mode == "crash") {
    std::cerr << "preflight broke\n";
    return 3;
  }
  if (mode == "garbage") std::cout << "\xff\xff";
  v1::PreflightResult result;
  result.set_free_disk_bytes(123);
  if (mode == "problem") {
    v1::PreflightProblem* problem = result.add_problems();
    problem->set_reason(v1::REASON_DATA_NOT_FOUND);
    problem->set_field("dataset.blend");
    problem->set_description("no such file");
  }
  if (mode != "garbage") result.SerializeToOstream(&std::cout);
  return 0;
}

int Verify(const std::string& path) {
  const bool corrupt = path.find("corrupt") != std::string::npos;
  std::cout << (corrupt ? R"({"ok":false,"reason":"REASON_CHECKPOINT_CORRUPT","detail":"shard 1"})"
                        : R"({"ok":true,"bytes":77,"tensors":5})")
            << "\n";
  return 0;
}

int Exit(const spool::AttemptDirectory& files, int rank, v1::Reason reason, int code) {
  v1::RankResult result;
  result.set_reason(reason);
  if (!spool::WriteProto(files.ResultPath(rank), result).ok()) return 99;
  return code;
}

void WaitForKey(const spool::AttemptDirectory& files, const std::string& key) {
  const auto rendezvous = spool::RendezvousDirectory::Open(files.RendezvousPath());
  while (rendezvous.ok() && !terminated) {
    const auto value = rendezvous->Get(key);
    if (value.ok() && value->has_value()) {
      std::cout << "got " << key << "=" << **value << std::endl;
      return;
    }
    ::usleep(5'000);
  }
}

void WriteRecords(const spool::AttemptDirectory& files, const Script& script) {
  auto writer = spool::RecordWriter::Open(files.SpoolPath());
  for (int i = 1; writer.ok() && i <= Number(script, "records") && !terminated; ++i) {
    v1::RankRecord record;
    record.mutable_metric()->set_step(i);
    if (!(*writer)->Append(record).ok()) std::cout << "spool error" << std::endl;
    ::usleep(static_cast<useconds_t>(Number(script, "interval")) * 1000);
  }
}

int Run(const v1::RankSpec& spec, const Script& script) {
  if (Number(script, "ignore_term") != 0) {
    ::signal(SIGTERM, SIG_IGN);
  } else {
    ::signal(SIGTERM, [](int) { terminated = 1; });
  }
  const spool::AttemptDirectory files(spec.attempt_directory());
  std::cout << "started " << ::getpid() << std::endl;
  if (Number(script, "log") > 0) std::cout << std::string(static_cast<size_t>(Number(script, "log")), 'x') << std::endl;
  if (const std::string set = Text(script, "set"); !set.empty()) {
    const auto rendezvous = spool::RendezvousDirectory::Open(files.RendezvousPath());
    if (!rendezvous.ok() || !rendezvous->Set(set.substr(0, set.find(':')), set.substr(set.find(':') + 1)).ok()) return 98;
  }
  if (const std::string key = Text(script, "await"); !key.empty()) WaitForKey(files, key);
  if (spec.rank() == 0) WriteRecords(files, script);
  // "end1=" is for rank 1, "end=" for all others.
  std::string end = Text(script, "end" + std::to_string(spec.rank()));
  if (end.empty()) end = Text(script, "end");
  while (end == "hang" && !terminated) ::usleep(10'000);
  if (terminated) return Exit(files, spec.rank(), v1::REASON_CANCELLED_BY_USER, 0);
  if (end.starts_with("silent:")) return std::atoi(end.c_str() + 7);
  if (end.starts_with("reason:")) return Exit(files, spec.rank(), static_cast<v1::Reason>(std::atoi(end.c_str() + 7)), 1);
  if (end.starts_with("signal:")) {
    const int signal = std::atoi(end.c_str() + 7);
    ::signal(signal, SIG_DFL);  // A sanitizer has its own handler.
    ::raise(signal);
  }
  return Exit(files, spec.rank(), v1::REASON_COMPLETED, 0);
}

int Main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--verify") return Verify(argv[2]);
  v1::RankSpec spec;
  if (argc < 3 || !spool::ReadProto(argv[argc - 1], &spec).ok()) return 97;
  const Script script = ParseScript(spec.run_name());
  if (std::string(argv[1]) == "--preflight") return Preflight(Text(script, "preflight"));
  return Run(spec, script);
}

}  // namespace
}  // namespace mbridge

int main(int argc, char** argv) { return mbridge::Main(argc, argv); }
