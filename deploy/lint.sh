#!/usr/bin/env bash
# Style and static checks over the tracked C++ files.
#
#   bash deploy/lint.sh --format            only clang-format, as CI does: lists each deviation, ends with 1 where there are any
#   bash deploy/lint.sh --fix               rewrites the files with clang-format
#   bash deploy/lint.sh [--werror] [FILE.cc...]   clang-format, then clang-tidy (build/compile_commands.json; slow)
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$MB_ROOT"

mode=all werror=() files=()
while [ $# -gt 0 ]; do
  case "$1" in
    --format) mode=format ;;
    --fix) mode=fix ;;
    --werror) werror=(--warnings-as-errors='*') ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *) files+=("$1") ;;
  esac
  shift
done

command -v clang-format >/dev/null || fail "clang-format is missing; bash deploy/setup.sh installs it"
mapfile -t sources < <(git ls-files -- '*.cc' '*.h')
if [ "$mode" = fix ]; then
  clang-format -i "${sources[@]}"
  say "formatted ${#sources[@]} files"
  exit 0
fi
clang-format --dry-run -Werror "${sources[@]}" || fail "formatting differs; bash deploy/lint.sh --fix corrects it"
say "clang-format: ${#sources[@]} files are as they should be"
[ "$mode" = all ] || exit 0

command -v clang-tidy >/dev/null || fail "clang-tidy is missing: apt-get install clang-tidy"
[ -f "$MB_BUILD/compile_commands.json" ] || fail "no $MB_BUILD/compile_commands.json; run bash deploy/setup.sh first"
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(git ls-files -- '*.cc')
say "clang-tidy: ${#files[@]} files"
printf '%s\0' "${files[@]}" |
  xargs -0 -n 4 -P "$MB_JOBS" clang-tidy --quiet -p "$MB_BUILD" "${werror[@]+"${werror[@]}"}"
