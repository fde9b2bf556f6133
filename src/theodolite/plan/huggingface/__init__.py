"""The `config.json` of transformers, in every dialect, read into a plan and written from one.

Dialects: `rope_parameters` of transformers 5, one dict or one per layer type (None there is no rotation); the older
`rope_scaling` with `rope_type` or `type` beside a top-level `rope_theta`; and the families' own keys.
"""

from theodolite.plan.huggingface.reading import read_config, read_config_file
from theodolite.plan.huggingface.writing import rope_parameters, write_config

__all__ = ["read_config", "read_config_file", "rope_parameters", "write_config"]
