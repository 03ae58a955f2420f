"""Discriminator guidance: what `run/guidance.sh` runs."""
