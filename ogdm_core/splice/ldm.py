"""The old place of `ogdm_core.ldm.train`: saved configs name it in `model.target`."""

from ogdm_core.ldm.train import __getattr__ as __getattr__
