"""Weights out into the world: safetensors, a diffusers folder, a model card."""
