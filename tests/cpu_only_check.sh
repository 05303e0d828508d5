#!/usr/bin/env bash
# That the tree builds without CUDA, in a build folder of its own which is removed afterwards.
#
#   bash tests/cpu_only_check.sh           configures with MB_CUDA=OFF, and with AUTO where NCCL is missing (seconds)
#   bash tests/cpu_only_check.sh --build   also builds everything and starts the rank program
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib/common.sh"

# Beside build/, so that ccache knows the objects: it sees relative paths.
folder="$(mktemp -d "$MB_ROOT/build-cpu-only.XXXXXX")"
trap 'rm -rf "$folder"' EXIT

# configure FOLDER OPTION...: no target of the result may need CUDA.
configure() {
  local to="$1"
  shift
  say "configure: $*"
  mkdir -p "$to"
  cmake -S "$MB_ROOT" -B "$to" -G Ninja "$@" >"$to/configure.log" 2>&1 || { cat "$to/configure.log"; fail "$* does not configure"; }
  MB_BUILD="$to" cuda_state | grep '^no: ' || { cat "$to/configure.log"; fail "$*: the CUDA engine is not off"; }
  if ninja -C "$to" -t targets all | grep -E '(_cuda(_test)?|mbrank-cuda|\.cu\.o):'; then
    fail "$*: these targets are CUDA's"
  fi
}

configure "$folder" -DMB_CUDA=OFF
# Without nvcc this is the case "there is no nvcc".
configure "$folder/auto" -DMB_CUDA=AUTO -DMB_NCCL=
(MB_BUILD="$folder" require_cuda_where_nvcc)
if command -v "${CUDACXX:-nvcc}" >/dev/null && (MB_BUILD="$folder/auto" require_cuda_where_nvcc) 2>/dev/null; then
  fail "tests/run.sh would go on without the CUDA engine although nvcc is here"
fi
if [ "${1:-}" = --build ]; then
  say "build: everything with MB_CUDA=OFF"
  ninja -C "$folder" -j "$MB_JOBS" || fail "the build without CUDA failed; the first error is above"
  "$folder/bin/mbrank" --version
fi
say "the tree builds without CUDA"
