"""Consistency distillation of a quickstart's fine-tunes: what `run/distil.sh` runs."""
