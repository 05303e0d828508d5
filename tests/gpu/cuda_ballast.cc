// Holds all memory of the first visible GPU but the given MiB until its standard input ends: a neighbour for tests of a full GPU.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  const size_t leave = static_cast<size_t>(argc == 2 ? std::atoll(argv[1]) : 0) << 20;
  if (leave == 0) {
    std::fprintf(stderr, "usage: cuda_ballast MIB-TO-LEAVE\n");
    return 2;
  }
  size_t free = 0, total = 0;
  void* memory = nullptr;
  cudaError_t error = cudaMemGetInfo(&free, &total);
  if (error == cudaSuccess && free > leave) error = cudaMalloc(&memory, free - leave);
  if (error == cudaSuccess) error = cudaMemGetInfo(&free, &total);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "cuda_ballast: %s\n", cudaGetErrorString(error));
    return 1;
  }
  std::printf("%zu of %zu MiB are free\n", free >> 20, total >> 20);
  std::fflush(stdout);
  while (std::getchar() != EOF) {}
  return 0;
}
