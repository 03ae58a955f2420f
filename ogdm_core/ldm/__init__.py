"""LDM: what the patched CompVis/latent-diffusion calls."""
