#!/usr/bin/env bash
# Makes the environment, fetches and patches the upstream codebases. `run/setup.sh --help` has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
setup_tool "$@"
