"""ADM: what the patched openai/guided-diffusion calls."""
