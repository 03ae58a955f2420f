"""A trainer for diffusers' U-Nets, with or without OGDM: `python -m ogdm_core.diffusers`."""
