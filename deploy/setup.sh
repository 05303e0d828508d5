#!/usr/bin/env bash
# Installs the Debian packages that are missing and builds the programs into build/bin. Safe to repeat.
#
#   bash deploy/setup.sh [--tests] [--no-packages] [TARGET...]
#     --tests         also the packages of the tests, and everything is built
#     --no-packages   build only
#     --packages-only install only
#   MB_BUILD=DIR  build folder (default build/)    MB_JOBS=N  parallel jobs (default: cores)
#   MB_CMAKE_ARGS="-DMB_MARCH=native ..."  for the first configure
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

packages=yes tests=no targets=()
arguments=("$@")
while [ $# -gt 0 ]; do
  case "$1" in
    --tests) tests=yes ;;
    --no-packages) packages=no ;;
    --packages-only) packages=only ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *) targets+=("$1") ;;
  esac
  shift
done

if [ "$packages" != no ]; then
  lists=("$MB_ROOT/deploy/packages.txt" "$MB_ROOT/deploy/packages-test.txt")  # Configuring needs GoogleTest too.
  install_packages "${lists[@]}"
fi
[ "$packages" != only ] || exit 0
drop_sudo "$MB_ROOT/deploy/setup.sh" --no-packages "${arguments[@]+"${arguments[@]}"}"

if [ "$tests" = no ] && [ ${#targets[@]} -eq 0 ]; then
  targets=(programs)
fi
build "${targets[@]+"${targets[@]}"}"
say "programs: $MB_BUILD/bin"
