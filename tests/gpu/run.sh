#!/usr/bin/env bash
# GPU tests and benchmarks, built here and run on a machine with GPUs that needs neither compiler nor packages.
#
#   bash tests/gpu/run.sh bundle [FILE]        builds and packs programs, tests and libraries (default build/gpu-bundle.tar.xz)
#   bash tests/gpu/run.sh on FILE PART...      unpacks FILE into a temporary folder and runs the parts; logs go to $OUT
#     ops          every CUDA operator against its CPU twin and in double precision, models, families (1 GPU, 60 s)
#     memcheck     the smallest of them under compute-sanitizer (SANITIZER) (1 GPU, 65 s)
#     families     every family's logits, loss and gradients against transformers (1 GPU, 2 s; HF_FIXTURES=tests/data/hf_fixtures.tar.xz)
#     parity       Megatron-LM's losses through mbctl, one GPU (1 GPU, 10 s)
#     moe_scatter  how far the losses of experts scatter by themselves (1 GPU, 25 s)
#     parity2      the same on two GPUs: dp2, tp2, tp2_sp, distopt, predictions (2 GPUs, 30 s)
#     determinism  two runs equal to the bit (1 GPU, 40 s)
#     fp16         FP16 with loss scaling beside BF16 (1 GPU, 5 s)
#     graphs       CUDA graphs: same bits, times (1 GPU, 10 s)
#     recompute    recomputation: same bits, less memory (1 GPU, 15 s)
#     memory       too large a job is refused, a full GPU ends one (1 GPU, 15 s)
#     watchdog     a rank killed, a rank stopped (2 GPUs, 80 s)
#     kernels      bandwidth and product tables (1 GPU, 80 s)
#     train        the rows of 1B (in turn with PyTorch), GPT-2, 0.5B, correlation (1 GPU, 6 min)
#     train8b      8B in BF16 and FP8 (1 GPU, 3 min)
#     fp8          losses in FP8 beside BF16 (FP8_RECIPES, FP8_LR) (1 GPU, 3 min)
#     qwen8b       Qwen3-8B on one GPU (1 GPU, 20 s)
#     moe          DeepSeek-V2-Lite, 12 layers (1 GPU, 10 s)
#     moe2         DeepSeek-V2-Lite whole on two GPUs (2 GPUs, 20 s)
#     profile      where the time of a 1B and an 8B step goes (1 GPU, 30 s)
#     profile_moe  the same of DeepSeek-V2-Lite, 12 layers (1 GPU, 15 s)
#     tuning       first suggestions and timed products, in turn (1 GPU, 2 min)
#     train2       1B data parallel, 8B tensor parallel, each beside one GPU (2 GPUs, 2 min)
#     resume2      from one rank's checkpoint on two tensor-parallel ranks (2 GPUs, 20 s)
#     fp8_torch    a report: FP8 beside BF16 in PyTorch, same shape and data (FP8_LR) (1 GPU, 4 min a rate)
#     overlap      gradients reduced while backward runs: same bits, times (2 GPUs, 20 s)
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
  cp "$root"/tests/gpu/*.py "$stage/"
  # One dictionary over all programs: they share most of their code.
  tar -C "$stage" -c . | xz -T1 --lzma2=preset=6,dict=192MiB >"$out"
  rm -rf "$stage"
  say "$out: $(du -h "$out" | cut -f1)"
  [ "$(stat -c %s "$out")" -le $((30 << 20)) ] || { echo "the bundle is above 30 MB: it has to travel" >&2; return 1; }
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
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
