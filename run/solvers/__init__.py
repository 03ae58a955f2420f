"""Every solver on every time grid: what run/solvers.sh runs."""
