# Shared by the scripts of deploy/ and tests/run.sh; to be sourced. Needs bash.
set -euo pipefail

MB_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
MB_BUILD="${MB_BUILD:-$MB_ROOT/build}"
MB_JOBS="${MB_JOBS:-$(nproc)}"

# The same object for the same source in any clone: CI builds in another folder than its author did.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$MB_ROOT}" CCACHE_NOHASHDIR="${CCACHE_NOHASHDIR:-1}"

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
  mb_bold=$'\e[1m' mb_red=$'\e[31m' mb_off=$'\e[0m'
else
  mb_bold='' mb_red='' mb_off=''
fi

# say TEXT: one line about what happens next.
say() { printf '%s==> %s%s\n' "$mb_bold" "$*" "$mb_off"; }

# fail TEXT: says why and what to do, ends with 1.
fail() {
  printf '%serror:%s %s\n' "$mb_red" "$mb_off" "$*" >&2
  exit 1
}

# package_names FILE...: the names in package lists, without comments.
package_names() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$@" | awk '{print $1}'; }

# install_packages FILE...: installs the listed Debian packages that are missing; does nothing where there are none.
install_packages() {
  command -v dpkg-query >/dev/null || fail "this script installs Debian packages; elsewhere install what $* list and pass --no-packages"
  local name missing=()
  for name in $(package_names "$@"); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] || missing+=("$name")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    say "packages: all present"
    return
  fi
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "missing packages and neither root nor sudo; as root: apt-get install ${missing[*]}"
    root=(sudo)
  fi
  say "packages: installing ${missing[*]}"
  local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -q)
  # The package index may be years old or empty: try with it first, then fetch a new one.
  if ! "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/tmp/mbridge-apt.$$ 2>&1; then
    "${apt[@]}" update
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
  fi
  rm -f /tmp/mbridge-apt.$$
}

# drop_sudo SCRIPT ARG...: under sudo, goes on as the user who called sudo, so that build/ and the state stay theirs.
drop_sudo() {
  [ "$(id -u)" -eq 0 ] && [ "${SUDO_UID:-0}" -ne 0 ] || return 0
  local home
  home="$(getent passwd "$SUDO_UID" | cut -d: -f6)"
  say "packages are in place; going on as $SUDO_USER"
  exec setpriv --reuid="$SUDO_UID" --regid="$SUDO_GID" --init-groups \
    env -u SUDO_UID -u SUDO_GID -u SUDO_USER -u SUDO_COMMAND HOME="$home" USER="$SUDO_USER" LOGNAME="$SUDO_USER" \
    bash "$@"
}

# cuda_state: what the build folder's last configure decided about the CUDA engine, "yes: ..." or "no: ..."; empty before that.
cuda_state() { [ ! -f "$MB_BUILD/CMakeCache.txt" ] || sed -n 's/^MB_CUDA_STATE:INTERNAL=//p' "$MB_BUILD/CMakeCache.txt"; }

# require_cuda_where_nvcc: fails where nvcc is on PATH but the CUDA engine is not built, unless MB_CUDA=OFF says that this is meant.
require_cuda_where_nvcc() {
  command -v "${CUDACXX:-nvcc}" >/dev/null || return 0
  case "$(cuda_state)" in
    yes:* | "no: MB_CUDA=OFF" | "") ;;
    *) fail "nvcc is here, but the CUDA engine would not be built ($(cuda_state)); mend that, or pass MB_CMAKE_ARGS=-DMB_CUDA=OFF with a new build folder" ;;
  esac
}

# build TARGET...: configures where needed and builds; no target means everything. With MB_STRICT_CUDA=1 as
# require_cuda_where_nvcc.
build() {
  if [ -e "$MB_BUILD" ] && [ ! -w "$MB_BUILD" ]; then
    fail "$MB_BUILD belongs to $(stat -c %U "$MB_BUILD"); remove it or set MB_BUILD to another folder"
  fi
  if [ ! -f "$MB_BUILD/build.ninja" ]; then
    say "configure: $MB_BUILD"
    cmake -S "$MB_ROOT" -B "$MB_BUILD" -G Ninja ${MB_CMAKE_ARGS:-} >"/tmp/mbridge-cmake.$$" 2>&1 || {
      cat "/tmp/mbridge-cmake.$$" >&2
      rm -f "/tmp/mbridge-cmake.$$"
      fail "cmake could not configure; the lines above say why"
    }
    rm -f "/tmp/mbridge-cmake.$$"
  fi
  [ -z "$(cuda_state)" ] || say "CUDA engine: $(cuda_state)"
  [ "${MB_STRICT_CUDA:-0}" != 1 ] || require_cuda_where_nvcc
  say "build: ${*:-everything}, $MB_JOBS jobs (the first time takes a while; ccache makes repeats short)"
  ninja -C "$MB_BUILD" -j "$MB_JOBS" "$@" || fail "the build failed; the first error is above"
  # Ninja may have configured again.
  [ "${MB_STRICT_CUDA:-0}" != 1 ] || require_cuda_where_nvcc
}
