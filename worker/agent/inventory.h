// What the node has to offer.
#pragma once

#include <string>
#include <string_view>

#include "mbridge/v1/node.pb.h"

namespace mbridge::agent {

// Host name, boot id, cores (CPU affinity, cgroup quota), memory (physical, cgroup limit), GPUs, instruction set.
// `cpu_slots` > 0 replaces the number of cores. Facts that the kernel does not tell stay unset.
v1::NodeInventory ReadInventory(int cpu_slots);

// GPUs by NVML, loaded at run time as `library`; none, and a line in the log, where there is no driver. CUDA_VISIBLE_DEVICES
// (indices or UUIDs) is honoured; parts of GPUs (MIG) are not offered, nor GPUs divided into parts.
void ReadGpus(v1::NodeInventory* inventory, const char* library = "libnvidia-ml.so.1");

// Takes GPUs away for which there is no code in `built` (BuiltGpuArchitectures), with a warning each; where that would leave
// none, all stay, so that a job for GPUs is told why they do not do.
void LeaveOutGpusWithoutKernels(v1::NodeInventory* inventory, std::string_view built);

// The widest of AVX2, AVX512, AVX512-BF16 and AMX that `cpuinfo_flags` (the flags line of /proc/cpuinfo) names.
std::string InstructionSet(const std::string& cpuinfo_flags);

}  // namespace mbridge::agent
