// NVML by dlopen: the agent runs on nodes without a driver, and Debian has no NVML header. Only what is used is declared.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>

#include "engine/core/gpu_architectures.h"
#include "worker/agent/inventory.h"

namespace mbridge::agent {
namespace {

using NvmlDevice = struct nvmlDevice_st*;
constexpr int kNvmlSuccess = 0;

struct NvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

// Says what the driver keeps for itself, too.
struct NvmlMemory2 {
  unsigned version;
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;
};
constexpr unsigned kNvmlMemory2 = sizeof(NvmlMemory2) | 2u << 24;

class Nvml {
 public:
  explicit Nvml(const char* library) : library_(::dlopen(library, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) {
      const char* const why = ::dlerror();
      spdlog::info("no GPUs are offered, for there is no NVIDIA driver: {}", why == nullptr ? library : why);
      return;
    }
    const bool complete = Load("nvmlInit_v2", &init_) && Load("nvmlShutdown", &shutdown_) &&
                          Load("nvmlDeviceGetCount_v2", &count_) && Load("nvmlDeviceGetHandleByIndex_v2", &handle_) &&
                          Load("nvmlDeviceGetUUID", &uuid_) && Load("nvmlDeviceGetName", &name_) &&
                          Load("nvmlDeviceGetMemoryInfo", &memory_) && Load("nvmlSystemGetDriverVersion", &driver_);
    Load("nvmlDeviceGetMemoryInfo_v2", &memory2_);  // Drivers before 510 have none.
    Load("nvmlDeviceGetCudaComputeCapability", &capability_);
    Load("nvmlDeviceGetMigMode", &mig_mode_);
    const int result = complete ? init_() : -1;
    ready_ = result == kNvmlSuccess;
    if (!ready_) spdlog::warn("no GPUs are offered: {} does not work (result {}); nvidia-smi says more", library, result);
  }
  ~Nvml() {
    if (ready_) shutdown_();
    if (library_ != nullptr) ::dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  unsigned Count() const {
    unsigned count = 0;
    return ready_ && count_(&count) == kNvmlSuccess ? count : 0;
  }

  bool Describe(unsigned index, v1::Gpu* gpu) const {
    NvmlDevice device = nullptr;
    char uuid[96] = {};
    char name[96] = {};
    char driver[96] = {};
    int64_t memory = 0;
    if (handle_(index, &device) != kNvmlSuccess || uuid_(device, uuid, sizeof(uuid)) != kNvmlSuccess ||
        name_(device, name, sizeof(name)) != kNvmlSuccess || !Memory(device, &memory) ||
        driver_(driver, sizeof(driver)) != kNvmlSuccess) {
      return false;
    }
    gpu->set_uuid(uuid);
    gpu->set_index(static_cast<int>(index));
    gpu->set_name(name);
    gpu->set_memory_bytes(memory);
    gpu->set_driver_version(driver);
    int major = 0, minor = 0;
    if (capability_ != nullptr && capability_(device, &major, &minor) == kNvmlSuccess)
      gpu->set_compute_capability(10 * major + minor);
    return true;
  }

  // Programs get a part of such a GPU, whatever it has itself.
  bool IsDivided(unsigned index) const {
    NvmlDevice device = nullptr;
    unsigned current = 0, pending = 0;
    return mig_mode_ != nullptr && handle_(index, &device) == kNvmlSuccess &&
           mig_mode_(device, &current, &pending) == kNvmlSuccess && current == 1;
  }

 private:
  // What programs can have, as CUDA counts it (143155 of an H200's 143771 MiB); all, where the driver does not say what it keeps.
  bool Memory(NvmlDevice device, int64_t* bytes) const {
    NvmlMemory2 known{kNvmlMemory2, 0, 0, 0, 0};
    if (memory2_ != nullptr && memory2_(device, &known) == kNvmlSuccess && known.reserved < known.total) {
      *bytes = static_cast<int64_t>(known.total - known.reserved);
      return true;
    }
    NvmlMemory memory{};
    if (memory_(device, &memory) != kNvmlSuccess) return false;
    *bytes = static_cast<int64_t>(memory.total);
    return true;
  }

  template <class Function> bool Load(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(::dlsym(library_, name));
    return *function != nullptr;
  }

  void* library_;
  bool ready_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*handle_)(unsigned, NvmlDevice*) = nullptr;
  int (*uuid_)(NvmlDevice, char*, unsigned) = nullptr;
  int (*name_)(NvmlDevice, char*, unsigned) = nullptr;
  int (*memory_)(NvmlDevice, NvmlMemory*) = nullptr;
  int (*memory2_)(NvmlDevice, NvmlMemory2*) = nullptr;
  int (*capability_)(NvmlDevice, int*, int*) = nullptr;
  int (*mig_mode_)(NvmlDevice, unsigned*, unsigned*) = nullptr;
  int (*driver_)(char*, unsigned) = nullptr;
};

// CUDA's list may name parts of GPUs; NVML has handles of whole ones.
void WarnOfParts() {
  const char* setting = std::getenv("CUDA_VISIBLE_DEVICES");
  std::istringstream text(setting == nullptr ? "" : setting);
  for (std::string item; std::getline(text, item, ',');) {
    if (!item.starts_with("MIG-")) continue;
    spdlog::warn(
        "CUDA_VISIBLE_DEVICES names {}: parts of GPUs (MIG) are not offered, only whole ones by index or GPU- UUID; turn MIG off "
        "(nvidia-smi -mig 0) or name others",
        item);
    return;
  }
}

bool IsVisible(const v1::Gpu& gpu) {
  const char* setting = std::getenv("CUDA_VISIBLE_DEVICES");
  if (setting == nullptr) return true;
  std::istringstream text(setting);
  for (std::string item; std::getline(text, item, ',');) {
    if (item == std::to_string(gpu.index()) || (item.starts_with("GPU-") && gpu.uuid().starts_with(item))) return true;
  }
  return false;
}

}  // namespace

void ReadGpus(v1::NodeInventory* inventory, const char* library) {
  const Nvml nvml(library);
  if (nvml.Count() > 0) WarnOfParts();
  for (unsigned index = 0; index < nvml.Count(); ++index) {
    v1::Gpu gpu;
    if (!nvml.Describe(index, &gpu)) {
      spdlog::warn("GPU {} does not answer and is left out", index);
    } else if (IsVisible(gpu) && nvml.IsDivided(index)) {
      spdlog::warn("GPU {} is divided into parts (MIG), which are not offered: turn MIG off (nvidia-smi -i {} -mig 0)", index,
                   index);
    } else if (IsVisible(gpu)) {
      *inventory->add_gpus() = gpu;
    }
  }
}

void LeaveOutGpusWithoutKernels(v1::NodeInventory* inventory, std::string_view built) {
  v1::NodeInventory usable;
  std::vector<std::string> reasons;
  for (const v1::Gpu& gpu : inventory->gpus()) {
    std::string why = WhyNoKernels(gpu.name(), gpu.compute_capability(), built);
    if (why.empty())
      *usable.add_gpus() = gpu;
    else
      reasons.push_back(std::move(why));
  }
  if (usable.gpus().empty()) return;
  for (const std::string& why : reasons) spdlog::warn("a GPU is left out: {}", why);
  *inventory->mutable_gpus() = usable.gpus();
}

}  // namespace mbridge::agent
