"""What run/setup.sh does: the environment, the submodules, the patches. Standard library only."""
