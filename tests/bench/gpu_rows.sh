#!/usr/bin/env bash
# Rows of the speed table of docs/benchmarks.md by name, on a machine with GPUs: each runs its parts of tests/gpu/run.sh in one call,
# with the peer and the ceiling that belong to it.
#
#   bash tests/bench/gpu_rows.sh BUNDLE ROW...      BUNDLE: tests/gpu/run.sh bundle makes it
#     1b           Llama-3.2-1B, PyTorch in turn, its ceiling, norm, SwiGLU, cross entropy and Adam kernels, attention (1 GPU, 6 min)
#     gpt2         GPT-2 124M, the correlation run, Qwen2.5-0.5B, and 1B in turn with PyTorch (1 GPU, 6 min)
#     8b           Llama-3-8B in BF16 and FP8 (1 GPU, 3 min)
#     two          1B data parallel, 8B tensor parallel, each beside one GPU (2 GPUs, 2 min)
#     experts      DeepSeek-V2-Lite, 12 layers (1 GPU, 10 s)
#     experts2     DeepSeek-V2-Lite whole (2 GPUs, 30 s)
#     qwen8b       Qwen3-8B (1 GPU, 20 s)
#     fp8          losses in FP8 beside BF16, in this engine (1 GPU, 3 min; FP8_RECIPES, FP8_LR)
#     fp8_torch    the same in PyTorch (1 GPU, 4 min; FP8_LR)
#     profile      where the milliseconds go (1 GPU, 30 s)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ $# -ge 2 ] || { sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | grep '^#' | cut -c3-; exit 2; }
bundle="$1" failed=0
shift
for row in "$@"; do
  case "$row" in
    1b) parts=(kernels train1b) ;;
    gpt2) parts=(train) ;;
    8b) parts=(train8b) ;;
    two) parts=(train2) ;;
    experts) parts=(moe) ;;
    experts2) parts=(moe2) ;;
    qwen8b | fp8 | fp8_torch | profile) parts=("$row") ;;
    *) echo "there is no row '$row': 1b gpt2 8b two experts experts2 qwen8b fp8 fp8_torch profile" >&2; exit 2 ;;
  esac
  bash "$root/tests/gpu/run.sh" on "$bundle" "${parts[@]}" || failed=$((failed + 1))
done
exit "$failed"
