#!/usr/bin/env bash
# Conversions against torch, transformers and safetensors; says that it was skipped, and exits with 77, where they are missing.
#
#   bash tests/hf/run.sh [BUILD_DIR] [ARGUMENT OF real_libraries.py...]
#     MB_HF_PYTHON   a Python that has them; default: python3
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$here/../../build"
case "${1:-}" in
  "" | -*) ;;
  *) build="$1"; shift ;;
esac
python="${MB_HF_PYTHON:-python3}"
if ! missing="$("$python" -c '
import importlib.util
names = ["torch", "transformers", "safetensors", "tokenizers", "accelerate"]
print(", ".join(name for name in names if importlib.util.find_spec(name) is None))' 2>&1)"; then
  missing="$python: $missing"
fi
if [ -n "$missing" ]; then
  echo "skipped: not installed: $missing"
  echo "pip install torch transformers==5.17.0 accelerate, or MB_HF_PYTHON=/path/to/python with them"
  exit 77
fi
exec "$python" "$here/real_libraries.py" --build "$build" "$@"
