"""Keep torch's inference mode away from what outlasts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

__all__ = ["outside_inference_mode"]

_NOTHING_TO_DO = contextlib.nullcontext()


def outside_inference_mode() -> AbstractContextManager[None]:
    """Leave inference mode, if that is on, to make tensors that may be written to at any time.

    Autograd takes them, too, while those made in inference mode can be written to in that mode
    alone. Gradients stay off, as they are in inference mode, or on if the caller has turned them on
    again.
    """
    # To ask takes a thirtieth of the time of leaving.
    return _left() if torch.is_inference_mode_enabled() else _NOTHING_TO_DO


@contextlib.contextmanager
def _left() -> Iterator[None]:
    is_recording = torch.is_grad_enabled()
    # Leaving alone would turn gradients on.
    with torch.inference_mode(False), torch.set_grad_enabled(is_recording):
        yield
