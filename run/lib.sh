# shellcheck shell=bash
# Shared by the scripts in run/; source it, do not run it:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
#     help_if_asked "$@"          # --help prints the comment at the top of the script
#     launch run.x diffusers "$@" # checks the arguments, makes the environment, becomes the module
#     check_arguments run.x "$@"  # --help or a wrong flag ends the script before anything is installed
#     ensure_env diffusers        # the environment with these extras; sets $PYTHON, puts it on PATH
#     extras_of "$@"              # what models and nets among the arguments need
#     ensure_upstream edm         # third_party/edm, fetched and patched
#
# Environment variables that a user may set:
#   OGDM_PYTHON   a Python to use as it is; nothing is installed
#   OGDM_MIRROR   a folder with clones of the upstream repositories

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Prints the comment block below the first line of the calling script.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

help_if_asked() {
  local arg
  for arg in "$@"; do
    case "$arg" in
      -h | --help)
        usage
        exit 0
        ;;
      --) return ;;
    esac
  done
}

# A Python 3.11 or later that can run run/setup, which needs the standard library only.
base_python() {
  local name
  for name in "${OGDM_PYTHON:-}" "$ROOT/.venv/bin/python" \
    python3 python3.13 python3.12 python3.11 python3.14 python; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  die "no Python 3.11 or later found. Install one, or name it: OGDM_PYTHON=/path/to/python $0"
}

setup_tool() {
  local python
  python="$(base_python)" || exit 1
  "$python" "$ROOT/run/setup" "$@"
}

# check_arguments MODULE ARG...: MODULE.flags, which needs the standard library only, parses ARGs;
# --help and a wrong flag end the script here. Where it cannot be imported yet, MODULE checks them.
check_arguments() {
  local python status=0 go_on=64 # --help ends with status 0, so "go on" has one of its own
  python="$(base_python)" || exit 1
  PYTHONPATH="$ROOT" "$python" -c "
import importlib, sys
module, *words = sys.argv[1:]
try:
    importlib.import_module(f'{module}.flags').parse(words)
except ModuleNotFoundError:
    pass
sys.exit($go_on)" "$@" || status=$?
  [ "$status" = "$go_on" ] || exit "$status"
}

# launch MODULE 'EXTRA...' ARG...: checks the arguments, makes the environment, becomes MODULE.
launch() {
  check_arguments "$1" "${@:3}"
  # shellcheck disable=SC2086  # the extras are words
  ensure_env $2
  "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    die "$PYTHON has no torch, and is used as it is. Install what is missing:" \
      "$PYTHON -m pip install -c constraints.txt -e '.[${2// /,}]'"
  exec "$PYTHON" -m "$1" "${@:3}"
}

# ensure_env [EXTRA...]: makes or completes the environment; a tenth of a second if it is complete.
ensure_env() {
  PYTHON="$(setup_tool --print-python "$@")" || exit 1
  PATH="$(dirname "$PYTHON"):$PATH"
  PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  # On a CPU glibc gives the memory of each large tensor back to the system, and fetches it again.
  : "${MALLOC_MMAP_THRESHOLD_:=2000000000}" "${MALLOC_TRIM_THRESHOLD_:=8000000000}"
  export PYTHON PATH PYTHONPATH MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_
}

# extras_of ARG...: the extras of the data, feature nets and native checkpoints among the arguments, each after a space.
extras_of() {
  local word before=""
  for word in "$@"; do
    case "$before $word" in
      *lite0*) printf ' features' ;;
      *" mnist") printf ' mnist' ;;
      "--features "* | *" --"*) ;; # a classifier ends in .pt, too
      *.pt) printf ' adm' ;;
      *.pkl) printf ' edm' ;;
      *.ckpt) printf ' ldm' ;;
      *[*?]*) printf ' adm edm ldm' ;; # a pattern, whose snapshots they may be
    esac
    before="$word"
  done
}

# ensure_upstream NAME...: fetches and patches these submodules, or stops with the reason.
ensure_upstream() { setup_tool --no-env --quiet "$@" || exit 1; }
