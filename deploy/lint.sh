#!/usr/bin/env bash
# Style and static checks over the tracked C++ files.
#
#   bash deploy/lint.sh --format            only clang-format, as CI does: lists each deviation, ends with 1 where there are any
#   bash deploy/lint.sh --fix               rewrites the files with clang-format
#   bash deploy/lint.sh [FILE.cc...]        clang-format, then clang-tidy; without files over the whole tree: about 45 core-minutes
#   bash deploy/lint.sh --since COMMIT      the same for the files that differ from COMMIT: about 20 s a file, less with many
#
# clang-tidy needs build/compile_commands.json and the generated headers: after a build. Any finding ends with 1.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$MB_ROOT"

mode=all since='' files=()
while [ $# -gt 0 ]; do
  case "$1" in
    --format) mode=format ;;
    --fix) mode=fix ;;
    --since)
      [ $# -gt 1 ] || fail "--since needs a commit, such as main"
      since="$2"
      shift
      ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
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
if [ -n "$since" ]; then
  [ ${#files[@]} -eq 0 ] || fail "give either --since or files"
  git rev-parse -q --verify "$since^{commit}" >/dev/null || fail "no commit $since"
  # A header is checked with the source beside it, else with any file that includes it.
  while read -r file; do
    case "$file" in
      *.cc) files+=("$file") ;;
      *.h)
        user="$(git ls-files -- "${file%.h}.cc")"
        [ -n "$user" ] || user="$(git grep -lF "#include \"$file\"" -- '*.cc' | head -1 || true)"  # Only CUDA files may.
        [ -z "$user" ] || files+=("$user")
        ;;
    esac
  done < <(git diff --name-only --diff-filter=d "$since" -- '*.cc' '*.h')
  [ ${#files[@]} -gt 0 ] || { say "clang-tidy: no file differs from $since"; exit 0; }
  mapfile -t files < <(printf '%s\n' "${files[@]}" | sort -u)
elif [ ${#files[@]} -eq 0 ]; then
  mapfile -t files < <(git ls-files -- '*.cc')
fi
say "clang-tidy: ${#files[@]} files"
exec python3 deploy/tidy.py -j "$MB_JOBS" -p "$MB_BUILD" "${files[@]}"
