#!/usr/bin/env bash
# Checkpoints against torch and megatron-core; says that it was skipped, and exits with 77, where they are missing.
#
#   bash tests/megatron/run.sh [BUILD_DIR] [MODEL...]
#     MB_MEGATRON_PYTHON   a Python that has them; default: python3
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="${1:-$here/../../build}"
[ $# -eq 0 ] || shift
python="${MB_MEGATRON_PYTHON:-python3}"
if ! missing="$("$python" -c '
import importlib.util
names = ["torch", "safetensors", "megatron"]
print(", ".join(name for name in names if importlib.util.find_spec(name) is None))' 2>&1)"; then
  missing="$python: $missing"
fi
if [ -n "$missing" ]; then
  echo "skipped: not installed: $missing"
  echo "pip install torch safetensors numpy && pip install --no-deps megatron-core, or MB_MEGATRON_PYTHON=/path/to/python with them"
  exit 77
fi
export OMP_NUM_THREADS=1
exec "$python" "$here/check_checkpoints.py" --build "$build" "$@"
