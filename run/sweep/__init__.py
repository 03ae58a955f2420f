"""Fine-tunes over a grid of settings, as a Snakemake workflow: run/sweep.sh."""
