"""Time, operations and memory of a training step with observation: `run/benchmark.sh`."""
