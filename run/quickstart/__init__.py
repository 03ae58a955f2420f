"""The quickstart: real digits, a diffusers U-Net, and the whole job on a CPU."""
