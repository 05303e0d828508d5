// Sine and cosine as NVIDIA's special function unit computes them (CUDA's __sincosf; PTX sin.approx and cos.approx).
//
// The unit's published shape (Oberman and Siu, "A high-performance area-efficient multifunction interpolator", 2005) is a table
// of quadratic pieces: the argument in turns, 64 pieces a quarter turn. The coefficients here were fitted to an H200's outputs at
// 2^22 points; results are within one F32 step (or 2^-30) of the unit's, for nine arguments in ten equal.
#pragma once

namespace mbridge {

// x in [0, 2 pi].
void CudaFastSinCos(float x, float* sine, float* cosine);

}  // namespace mbridge
