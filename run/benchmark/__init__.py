"""Time, memory and operations of a training step with observation: run/benchmark.sh."""
