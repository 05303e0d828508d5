#!/usr/bin/env bash
# GPU tests and benchmarks, built here and run on a machine with GPUs that needs neither compiler nor packages.
#
#   bash tests/gpu/run.sh bundle [FILE]        builds and packs programs, tests and libraries (default build/gpu-bundle.tar.xz)
#   bash tests/gpu/run.sh on FILE PART...      unpacks FILE into a temporary folder and runs the parts; logs go to $OUT
#     ops      every CUDA operator against its CPU twin         (1 GPU, ~1 min)
#     memcheck the same under compute-sanitizer, small shapes   (1 GPU, ~3 min)
#     parity   Megatron-LM's losses through mbctl, one GPU      (1 GPU, ~1 min)
#     moe_scatter how far the losses of experts scatter by themselves (1 GPU, ~2 min)
#     parity2  the same on two GPUs: dp2, tp2, tp2_sp, distopt  (2 GPUs, ~2 min)
#     families every family's logits, loss and gradients against transformers (1 GPU, ~1 min; HF_FIXTURES=tests/data/hf_fixtures.tar.xz)
#     determinism two runs equal to the bit                (1 GPU, ~1 min)
#     fp16     FP16 with loss scaling beside BF16          (1 GPU, ~1 min)
#     graphs   CUDA graphs: same bits, times               (1 GPU, ~1 min)
#     recompute recomputation: same bits, less memory      (1 GPU, ~2 min)
#     memory   too large a job is refused, a full GPU ends one  (1 GPU, ~2 min)
#     watchdog a rank killed, a rank stopped               (2 GPUs, ~3 min)
#     kernels  bandwidth and GEMM tables                        (1 GPU, ~1 min)
#     train    step times of the benchmark rows beside PyTorch  (1 GPU, ~6 min)
#     qwen8b   Qwen3-8B on one GPU                      (1 GPU, ~3 min)
#     moe      DeepSeek-V2-Lite, 12 layers              (1 GPU, ~2 min)
#     moe2     DeepSeek-V2-Lite whole on two GPUs         (2 GPUs, ~1 min)
#     profile  where the time of a 1B and an 8B step goes      (1 GPU, ~3 min)
#     profile_moe the same of DeepSeek-V2-Lite, 12 layers      (1 GPU, ~1 min)
#     tuning   first suggestions and timed products, in turn    (1 GPU, ~3 min)
#     train2   the two-GPU rows                                 (2 GPUs, ~5 min)
#   PEER=FILE  the PyTorch script that `train` runs beside ours; without it only ours runs
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

bundle() {
  source "$root/deploy/lib/common.sh"
  local out="${1:-$MB_BUILD/gpu-bundle.tar.xz}" stage
  local programs=(mbcoordinator mbagent mbshim mbctl mbrank-cuda)
  build "${programs[@]}" gpu_tests
  stage="$(mktemp -d)"
  mkdir "$stage/bin" "$stage/lib" "$stage/tests"
  for program in "${programs[@]}"; do strip -o "$stage/bin/$program" "$MB_BUILD/bin/$program"; done
  for test in "$MB_BUILD"/tests/*_cuda_test "$MB_BUILD"/bin/cuda_*_bench "$MB_BUILD/bin/cuda_ballast"; do
    [ ! -x "$test" ] || strip -o "$stage/tests/$(basename "$test")" "$test"
  done
  # What an Ubuntu 24.04 with CUDA 13 has: the C and C++ run-time libraries and CUDA's own.
  ldd "$stage"/bin/* "$stage"/tests/* | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
    grep -vE '/(libc|libm|libgcc_s|libstdc\+\+|libpthread|libdl|librt|libresolv|libcublas|libcublasLt|libcudnn[a-z_]*|libnccl|libcudart|libnvrtc)\.so' |
    while read -r library; do
      cp -L "$library" "$stage/lib/" && strip --strip-unneeded "$stage/lib/$(basename "$library")" 2>/dev/null || true
    done
  cp -r "$root/tests/data/mlm" "$root/tests/gpu/parts.sh" "$stage/"
  [ -z "${PEER:-}" ] || cp "$PEER" "$stage/peer.py"
  # One dictionary over all programs: they share most of their code.
  tar -C "$stage" -c . | xz -T1 --lzma2=preset=6,dict=192MiB >"$out"
  rm -rf "$stage"
  say "$out: $(du -h "$out" | cut -f1)"
}

case "${1:-}" in
  bundle) shift; bundle "$@" ;;
  on)
    [ $# -ge 3 ] || { echo "usage: run.sh on FILE PART..." >&2; exit 2; }
    stage="$(mktemp -d)"
    tar -C "$stage" -xJf "$2"
    shift 2
    exec bash "$stage/parts.sh" "$@"
    ;;
  *) sed -n '2,27s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
