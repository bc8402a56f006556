"""Progress bars of huggingface_hub, transformers and diffusers, hidden where the caller shows none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_hidden = ContextVar("hidden", default=False)
_LOADERS = ("transformers.utils.logging", "diffusers.utils.logging")


@contextmanager
def hidden_progress_bars(hide: bool = True) -> Iterator[None]:
    """Hide the bars of whatever is downloaded or loaded inside, if `hide`; what an outer block hides stays hidden."""
    token = _hidden.set(_hidden.get() or hide)
    try:
        yield
    finally:
        _hidden.reset(token)


@contextmanager
def library_progress_bars() -> Iterator[None]:
    """Wraps a call of these libraries: their bars are off inside `hidden_progress_bars`, and then as they were."""
    from huggingface_hub import constants, utils

    hub: Any = utils
    is_forced = constants.HF_HUB_DISABLE_PROGRESS_BARS is False  # the environment variable of that name is 0
    if is_forced or not _hidden.get():
        yield
        return
    # Libraries that are not imported yet are left alone: they do not run here.
    loaders = [sys.modules[name] for name in _LOADERS if name in sys.modules]
    shown = [loader for loader in loaders if loader.is_progress_bar_enabled()]
    is_hub_shown = not hub.are_progress_bars_disabled()
    hub.disable_progress_bars()
    for loader in shown:
        loader.disable_progress_bar()
    try:
        yield
    finally:
        for loader in shown:
            loader.enable_progress_bar()  # that of transformers also enables those of the hub
        (hub.enable_progress_bars if is_hub_shown else hub.disable_progress_bars)()
