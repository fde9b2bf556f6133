"""Keep transformers off the terminal for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines below errors, no warnings, no progress bars inside the block; all settings restored after it."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars, gguf_bar = not are_progress_bars_disabled(), gguf_utils.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    # The bar over GGUF tensors obeys no setting.
    gguf_utils.tqdm = lambda tensors, **_: tensors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_utils.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        # transformers switches the hub's bars along with its own.
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
