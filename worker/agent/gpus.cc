// NVML by dlopen: the agent runs on nodes without a driver, and Debian has no NVML header. Only what is used is declared.
#include <dlfcn.h>

#include <cstdlib>
#include <set>
#include <sstream>

#include <spdlog/spdlog.h>

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

class Nvml {
 public:
  Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    const bool complete = Load("nvmlInit_v2", &init_) && Load("nvmlShutdown", &shutdown_) &&
                          Load("nvmlDeviceGetCount_v2", &count_) && Load("nvmlDeviceGetHandleByIndex_v2", &handle_) &&
                          Load("nvmlDeviceGetUUID", &uuid_) && Load("nvmlDeviceGetName", &name_) &&
                          Load("nvmlDeviceGetMemoryInfo", &memory_) && Load("nvmlSystemGetDriverVersion", &driver_);
    const int result = complete ? init_() : -1;
    ready_ = result == kNvmlSuccess;
    if (!ready_) spdlog::warn("libnvidia-ml.so.1 does not work (result {}): no GPUs", result);
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
    NvmlMemory memory{};
    if (handle_(index, &device) != kNvmlSuccess || uuid_(device, uuid, sizeof(uuid)) != kNvmlSuccess ||
        name_(device, name, sizeof(name)) != kNvmlSuccess || memory_(device, &memory) != kNvmlSuccess ||
        driver_(driver, sizeof(driver)) != kNvmlSuccess) {
      return false;
    }
    gpu->set_uuid(uuid);
    gpu->set_index(static_cast<int>(index));
    gpu->set_name(name);
    gpu->set_memory_bytes(static_cast<int64_t>(memory.total));
    gpu->set_driver_version(driver);
    return true;
  }

 private:
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
  int (*driver_)(char*, unsigned) = nullptr;
};

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

void ReadGpus(v1::NodeInventory* inventory) {
  const Nvml nvml;
  for (unsigned index = 0; index < nvml.Count(); ++index) {
    v1::Gpu gpu;
    if (!nvml.Describe(index, &gpu)) {
      spdlog::warn("GPU {} does not answer and is left out", index);
    } else if (IsVisible(gpu)) {
      *inventory->add_gpus() = gpu;
    }
  }
}

}  // namespace mbridge::agent
