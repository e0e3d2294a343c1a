#!/usr/bin/env bash
# Puts the project and what it needs into .venv. Run it again at any time: it does only what is missing.
#
#   bash setup.sh              what `python -m trainer` needs on a CPU
#   bash setup.sh --dev        and what the tests, the linter and the type checker need
#   bash setup.sh --tpu        and libtpu
#   bash setup.sh --gpu        and CUDA 13 for NVIDIA GPUs
#   bash setup.sh --arrow      and the extra arrow of pyproject.toml; in the same way gcs, goodput,
#                              prometheus, ray, s3, standin, tfds, wandb
#   --python 3.12 | PATH       this interpreter, not the newest suitable one that is found
#   --venv DIR                 another folder than .venv
#
# Installs the versions of requirements.lock, with uv if it is installed, otherwise with pip.
set -euo pipefail

readonly SUPPORTED="3.13 3.12 3.11 3.14" # newest first, and last what is untested
readonly TORCH="torch==2.13.0"      # the tests compare with transformers, which computes with torch

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$root/.venv"
wanted=""
extras=""

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: error: %s\n' "$@" >&2
  exit 1
}

while [ $# -gt 0 ]; do
  case "$1" in
    --dev | --tpu | --gpu | --arrow | --gcs | --goodput | --prometheus | --ray | --s3 | --standin | --tfds | --wandb)
      extras="$extras ${1#--}"
      ;;
    --python | --venv)
      [ $# -ge 2 ] || fail "$1 needs a value. See the head of setup.sh."
      if [ "$1" = --python ]; then
        wanted="$2"
      else
        case "$2" in /*) venv="$2" ;; *) venv="$PWD/$2" ;; esac
      fi
      shift
      ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$root/setup.sh"
      exit 0
      ;;
    *) fail "unknown argument '$1'. It takes --dev, --tpu, --gpu or another extra, --python VERSION_OR_PATH, --venv DIR." ;;
  esac
  shift
done

uv=""
# A shim that finds no uv for the current Python is not a uv: run it.
if uv --version >/dev/null 2>&1; then uv=uv; fi

# ---- the interpreter

# Prints "VERSION PATH" where $1 can carry the project, else the reason on stderr.
probe() {
  "$1" -I - "$uv" <<'PY'
import sys, sysconfig
here = "%d.%d.%d" % sys.version_info[:3]
reason = ""
if sys.implementation.name != "cpython":
  reason = "is " + sys.implementation.name + ", not CPython"
elif sys.version_info[:2] < (3, 11):
  reason = "is Python " + here
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
  reason = "is a free-threaded build, which the dependencies do not support"
elif sys.maxsize < 2**32:
  reason = "is a 32-bit build"
else:
  for module in ["ctypes", "ssl", "zlib", "bz2", "lzma", "sqlite3"] + ([] if sys.argv[1] else ["venv", "ensurepip"]):
    try:
      __import__(module)
    except ImportError:
      reason = "Python " + here + " comes without the module " + module
      break
if reason:
  sys.exit(reason)
print(here, sys.executable)
PY
}

# Lists the interpreters to try, best first: newest version first, and within a version those on PATH first.
candidates() {
  local version path
  for version in $SUPPORTED; do
    type -ap "python$version" || true
    for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
      "${XDG_DATA_HOME:-$HOME/.local/share}/uv/python/cpython-$version".*/bin/python \
      "/opt/homebrew/bin/python$version" "/usr/local/bin/python$version"; do
      if [ -x "$path" ]; then echo "$path"; fi
    done
  done
  type -ap python3 python || true
}

# Sets python and version, or ends with what was tried and what to do.
find_python() {
  local path found tried="" error
  error="$(mktemp)"
  while read -r path; do
    if found="$(probe "$path" 2>"$error")"; then
      rm -f "$error"
      version="${found%% *}" python="${found#* }"
      return
    fi
    tried="$tried
  $path: $(tail -n 1 "$error")"
  done < <(if [ -n "$wanted" ]; then wanted_candidates; else candidates; fi)
  rm -f "$error"
  fail "no suitable Python found${wanted:+ for --python $wanted}. CPython 3.11 or newer is needed (64 bit; 3.14 is untested)." \
    "Install one (apt-get install python3 python3-venv, brew install python@3.13, uv python install 3.13)," \
    "or point to one: bash setup.sh --python /path/to/python3. Tried:${tried:- nothing is called python here}"
}

wanted_candidates() {
  case "$wanted" in
    */*) echo "$wanted" ;;
    *) candidates | grep -E "python$wanted\$|[/-]$wanted[.0-9]*[-/]" || true ;;
  esac
}

# An environment that works is kept: its interpreter was the newest when it was made. --python replaces it.
if [ -z "$wanted" ] && [ -f "$venv/pyvenv.cfg" ] && found="$(probe "$venv/bin/python" 2>/dev/null)"; then
  version="${found%% *}" python="$venv/bin/python" reason="that of $venv, which exists"
else
  find_python
  reason="the newest suitable one found${wanted:+ for --python $wanted}"
fi
say "Python $version at $python ($reason)"

# ---- is there anything to do?

# The state of what decides the environment's contents. Extras only ever add up.
stamp="$venv/.trainer-setup"
fingerprint="$version $root $(cat "$root/pyproject.toml" "$root/requirements.lock" "$root/setup.sh" | cksum)"
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$fingerprint" ]; then
  installed="$(tail -n +2 "$stamp")"
else
  installed="none"
fi
missing=""
for extra in core $extras; do
  case " $installed " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac
done
if [ -z "$missing" ]; then
  say "$venv is up to date ($installed)"
  exit 0
fi

# ---- the environment

started=$SECONDS
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
  fail "$venv exists and is not a virtual environment. Move it away, or name another folder with --venv."
fi
if [ "$(probe "$venv/bin/python" 2>/dev/null | cut -d' ' -f1)" != "$version" ]; then
  rm -rf "$venv"
  if [ -n "$uv" ]; then
    uv venv --quiet --seed --python "$python" "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
# The lock without its hashes, which the images check: pip cannot install a folder while it checks hashes, and a mirror
# may have files of its own.
versions() { sed -e '/^ *--hash/d' -e 's/ *\\$//' "$root/requirements.lock"; }
all="$(for extra in $extras $(tail -n +2 "$stamp" 2>/dev/null | sed 's/core//'); do echo "$extra"; done | sort -u | paste -sd, -)"
rm -f "$stamp" # until the end, the environment is not complete
target="$root${all:+[${all//_/-}]}" # pip 23, which Python 3.11 has, finds no extra with an underscore
if [ -n "$uv" ]; then
  say "installing ${all:-core} with uv"
  # Byte code too, as pip does unasked: else the first start compiles a million lines of Python before its first step,
  # and every start does where PYTHONDONTWRITEBYTECODE is set, as in many containers.
  UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}" uv pip install --quiet --python "$venv/bin/python" --constraint <(versions) --editable "$target"
else
  say "installing ${all:-core} with pip (a few minutes; uv would be faster)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint <(versions) --editable "$target"
fi
"$venv/bin/python" -m compileall -q "$root/src"

# ---- torch, for the tests against transformers, where a CPU build of it is to be had

# Only a CPU build: the default build for Linux brings gigabytes of CUDA that no test here uses. pip is asked first
# what it would take, which costs no download.
offered_torch() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --no-deps --ignore-installed \
    --only-binary :all: --report - "$TORCH" 2>/dev/null |
    "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null
}
case ",$all," in
  *,dev,*)
    offer="$(offered_torch || true)"
    case "$(uname -s) $offer" in
      *+cpu | Darwin\ 2*)
        say "installing torch $offer, for the tests against transformers"
        # uv takes a tenth of pip's time, but does not read pip's settings, which may say where this build is.
        if [ -z "$uv" ] || ! uv pip install --quiet --python "$venv/bin/python" --constraint <(versions) \
          "torch==$offer" 2>/dev/null; then
          "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint <(versions) "$TORCH"
        fi
        ;;
      *)
        say "torch is left out: pip offers ${offer:+only }${offer:-no $TORCH for Python $version}${offer:+, a build with CUDA}."
        say "  The tests against transformers will be skipped; CONTRIBUTING.md says how to get them."
        ;;
    esac
    ;;
esac

echo "$fingerprint" >"$stamp"
echo "core${all:+ ${all//,/ }}" >>"$stamp"
say "done in $((SECONDS - started)) s: $venv (core${all:+ ${all//,/ }})"
