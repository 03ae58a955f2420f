#!/usr/bin/env bash
# Lints, checks types, then runs the tests; sets itself up first.
#
# usage: run/test.sh [PYTEST-ARGUMENT...]
#
#   run/test.sh                  everything
#   run/test.sh -m "not upstream"   about a minute: no upstream code, no training that takes long
#   run/test.sh --lint           ruff and mypy only
#   run/test.sh -k edm           one backbone's tests: adm, edm, ldm or diffusers
#   run/test.sh tests/core       one folder or file
#   run/test.sh -n 0             in one process, as a debugger wants it
#   run/test.sh --cluster        the smoke table through a real Slurm, started on this machine; needs
#                                root, and apt-get install slurm-wlm munge
#   run/test.sh --faults         also the slow tests of faults (tests/faults, docs/reliability.md)
#
# Needs Python 3.11 or later and git; no GPU. Tests on upstream code run where run/setup.sh has
# fetched third_party/, and are skipped elsewhere; the closing summary says so.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

lint_only=false
if [ "${1:-}" = --lint ]; then
  lint_only=true
  ensure_env dev
else
  ensure_env all
fi
cd "$ROOT"

if [ "${1:-}" = --cluster ]; then
  export OGDM_CLUSTER=1 OMP_NUM_THREADS=1
  exec "$PYTHON" -m pytest -n 0 tests/cluster "${@:2}"
fi

if $lint_only || "$PYTHON" -c 'import mypy, ruff' 2>/dev/null; then
  "$PYTHON" -m ruff check
  "$PYTHON" -m ruff format --check
  "$PYTHON" -m mypy
else
  say "ruff and mypy are not in this environment; pip install -c constraints.txt -e '.[dev]' brings"
  say "them. Linting and the check of types are left out."
fi

if $lint_only; then exit; fi

# One thread per worker: the models here are too small to gain from more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)"
workers=$((cores < 2 ? 0 : cores < 4 ? cores : 4))

# A file stays on one worker, so that what its tests share is made once.
exec "$PYTHON" -m pytest -n "$workers" --dist loadfile "$@"
