#!/usr/bin/env bash
# Installs what the tests need, builds everything and runs every test. Safe to repeat.
#
#   bash tests/run.sh [--full] [--no-packages] [CTEST ARGUMENT...]
#     --full   also the long forms: random kills and soak (MB_FULL=1), the benchmark, promtool, a build without CUDA
#   Where nvcc is on PATH the CUDA engine is built too, or nothing is (MB_CMAKE_ARGS=-DMB_CUDA=OFF leaves it out).
#   Examples: bash tests/run.sh -R parity_      bash tests/run.sh -L e2e
#   The last line is 'N passed, N failed'; the exit code is 0 only when nothing failed and something ran.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib/common.sh"

packages=yes full=no
arguments=("$@")
ctest_arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --full) full=yes ;;
    --no-packages) packages=no ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) ctest_arguments+=("$1") ;;
  esac
  shift
done

lists=("$MB_ROOT/deploy/packages.txt" "$MB_ROOT/deploy/packages-test.txt")
[ "$full" = no ] || lists+=("$MB_ROOT/deploy/packages-extra.txt")
[ "$packages" = no ] || install_packages "${lists[@]}"
drop_sudo "$MB_ROOT/tests/run.sh" --no-packages "${arguments[@]+"${arguments[@]}"}"

SECONDS=0
MB_STRICT_CUDA=1 build
built=$SECONDS

export MB_BUILD GTEST_COLOR=no
if [ "$full" = yes ]; then
  export MB_FULL=1
else
  ctest_arguments=(-LE '^full$' "${ctest_arguments[@]+"${ctest_arguments[@]}"}")
fi
say "tests: $([ "$full" = yes ] && echo 'long form' || echo 'short form; --full runs the long one')"
SECONDS=0
report="$(mktemp)"
trap 'rm -f "$report"' EXIT
status=0
# Unit tests share the cores; tests with PROCESSORS 2 (end-to-end, parity) run alone.
(cd "$MB_BUILD" && ctest --output-on-failure --no-tests=error --timeout 900 -j "$MB_JOBS" --output-junit "$report" \
  "${ctest_arguments[@]+"${ctest_arguments[@]}"}") || status=$?

# CTest writes each attribute of the suite on a line of its own.
count() { sed -n '/<testsuite /,/>/s/.*\b'"$1"'="\([0-9]*\)".*/\1/p; /<testcase /q' "$report" | sed -n 1p | grep . || echo 0; }
total="$(count tests)" failed="$(count failures)" disabled="$(count disabled)" skipped="$(count skipped)"
say "build ${built} s, tests ${SECONDS} s"
passed=$((total - failed - disabled - skipped))
[ "$passed" -gt 0 ] || status=1
[ "$status" -eq 0 ] || say "at least one test failed; bash tests/run.sh -R NAME runs one, -V shows its output"
echo "$passed passed, $failed failed, $((disabled + skipped)) skipped"
exit "$status"
