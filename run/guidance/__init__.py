"""Discriminator guidance: what `run/guidance.sh` runs.

train      a guide between data and samples of one model
compare    the fine-tunes of a quickstart, with and without guidance
"""
