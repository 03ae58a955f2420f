#!/usr/bin/env bash
# Lints, then runs the tests; sets itself up first.
#
# usage: run/test.sh [PYTEST-ARGUMENT...]
#
#   run/test.sh                  everything
#   run/test.sh -k edm           one backbone's tests: adm, edm, ldm or diffusers
#   run/test.sh tests/test_x.py  one file
#   run/test.sh -n 0             in one process, as a debugger wants it
#
# Needs Python 3.10 or later and git; no GPU. Tests on upstream code run where run/setup.sh has
# fetched third_party/, and are skipped elsewhere; the closing summary says so.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

ensure_env all
cd "$ROOT"

if "$PYTHON" -c 'import ruff' 2>/dev/null || command -v ruff >/dev/null; then
  ruff check
  ruff format --check
else
  say "ruff is not in this environment; linting is left out (pip install -e '.[dev]' brings it)"
fi

# One thread a worker: the models here are too small to gain from more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)"
workers=$((cores < 2 ? 0 : cores < 4 ? cores : 4))

# A file stays on one worker, so that what its tests share is made once.
exec "$PYTHON" -m pytest -n "$workers" --dist loadfile "$@"
