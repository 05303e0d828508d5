// libnvidia-ml.so.1 of a machine with two GPUs. FAKE_NVML: words for what is different: "old" knows no reserved memory,
// "broken" does not start, "mig" has its second GPU divided.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr unsigned long long kMiB = 1 << 20;

bool Is(const char* word) {
  const char* const words = std::getenv("FAKE_NVML");
  return words != nullptr && std::strstr(words, word) != nullptr;
}

struct Memory {
  unsigned long long total, free, used;
};
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

int devices[2];

}  // namespace

extern "C" {

int nvmlInit_v2() { return Is("broken") ? 9 : 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &devices[index];
  return 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU-%d-0000", device == &devices[0] ? 0 : 1);
  return 0;
}
int nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::snprintf(text, size, "NVIDIA H200");
  return 0;
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.0");
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = device == &devices[0] ? 9 : 12;
  *minor = device == &devices[0] ? 0 : 1;
  return 0;
}
int nvmlDeviceGetMigMode(void* device, unsigned* current, unsigned* pending) {
  if (device == &devices[0]) return 3;  // Not supported.
  *current = *pending = Is("mig") ? 1 : 0;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {143771 * kMiB, 1, 1};
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void*, Memory2* memory) {
  if (Is("old")) return 3;                      // Not supported.
  if (memory->version != 0x2000028) return 25;  // Another structure.
  *memory = {memory->version, 143771 * kMiB, 616 * kMiB, 1, 1};
  return 0;
}

}  // extern "C"
