"""FID, precision and recall of image files: what `run/evaluate.sh` runs.

sources.py            what is compared: images, saved statistics, or both
features.py           feature nets: Inception, any by import path, the quickstart's classifier
extract.py            images -> features and their statistics, in chunks that are kept
metrics.py            FID, precision and recall, nearest neighbours of features
torch_evaluator.py    the numbers, from the modules above
adm.py                the same numbers from guided-diffusion's own evaluator
classifier.py         the quickstart's feature net
"""
