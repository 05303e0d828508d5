#include "worker/agent/inventory.h"

#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "worker/spool/file.h"
#include "worker/spool/process_identity.h"

namespace mbridge::agent {
namespace {

int AffinityCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));  // More CPUs than the set holds.
}

// Limits of a container: in one, its own cgroup is mounted as the root.
int QuotaCores() {
  std::istringstream text(spool::ReadFile("/sys/fs/cgroup/cpu.max").value_or(""));
  double quota = 0;
  double period = 0;
  if (!(text >> quota >> period) || quota <= 0 || period <= 0) return 0;  // "max"
  return std::max(1, static_cast<int>(std::floor(quota / period)));
}

int64_t MemoryBytes() {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return 0;
  int64_t bytes = static_cast<int64_t>(info.totalram) * info.mem_unit;
  std::istringstream text(spool::ReadFile("/sys/fs/cgroup/memory.max").value_or(""));
  int64_t limit = 0;
  if (text >> limit && limit > 0) bytes = std::min(bytes, limit);
  return bytes;
}

std::string CpuFlags() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.starts_with("flags")) return line.substr(line.find(':') + 1);
  }
  return "";
}

}  // namespace

std::string InstructionSet(const std::string& cpuinfo_flags) {
  std::istringstream words(cpuinfo_flags);
  const std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
  if (flags.count("amx_bf16") > 0) return "AMX";
  if (flags.count("avx512_bf16") > 0) return "AVX512-BF16";
  if (flags.count("avx512f") > 0) return "AVX512";
  if (flags.count("avx2") > 0) return "AVX2";
  return "";
}

v1::NodeInventory ReadInventory(int cpu_slots) {
  v1::NodeInventory inventory;
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) == 0) inventory.set_hostname(name);
  inventory.set_boot_id(spool::CurrentBootId().value_or(""));
  int cores = AffinityCores();
  if (const int quota = QuotaCores(); quota > 0) cores = std::min(cores, quota);
  inventory.set_cpu_cores(cpu_slots > 0 ? cpu_slots : cores);
  inventory.set_memory_bytes(MemoryBytes());
  inventory.set_cpu_isa(InstructionSet(CpuFlags()));
  ReadGpus(&inventory);
  return inventory;
}

}  // namespace mbridge::agent
