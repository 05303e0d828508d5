// How the CUDA matrix products choose among cuBLASLt's algorithms. One choice per problem and process.
#pragma once

#include <string>

namespace mbridge::cuda {

struct GemmTuning {
  // Times cuBLASLt's candidates at the first product of a shape and keeps the fastest. Else its first suggestion is taken, which
  // is the same in every process with the same GPU and cuBLAS version (bits do not depend on timings).
  bool time_candidates = false;
  int candidates = 16;  // Asked for; 1 to 64.
  // Choices are read from here at once and written after every new one (temporary file and rename); empty: none.
  std::string cache_file = {};
};

// A process starts with the defaults, or where the environment has MB_TIME_GEMMS=1 with timed candidates; MB_TIME_GEMMS=FILE also
// keeps them in that file.

// Forgets all choices and takes new rules. Not while products run in other threads. A cache file of another GPU model or cuBLAS
// version is ignored; one that cannot be read as such throws EngineError. For tests and benchmarks.
void SetGemmTuning(const GemmTuning& tuning);

}  // namespace mbridge::cuda
