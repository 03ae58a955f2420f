"""Our own trainer, for diffusers' U-Nets: `python -m ogdm_core.trainer`."""
