"""Keep torch.compile away from our own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def uncompiled(function: FunctionT) -> FunctionT:
    """Let torch.compile run a function, and everything that it calls, as it is.

    A compiled function that calls backward or steps an optimizer would otherwise have the hooks
    compiled, too, and the reductions behind them: that takes many seconds, and gains nothing.
    ``torch.compiler.disable`` does the same, but costs over 1 µs in each call, which is too much
    for a hook of every parameter, and imports the compiler for those who do not use it.

    Parameters
    ----------
    function : function
        Changed in place. Versions of torch that cannot mark it compile it.

    Returns
    -------
    function
    """
    # These are torch's own affair. A version that changes them must not be refused for that.
    with contextlib.suppress(AttributeError, TypeError):
        of_frames = torch._C._dynamo.eval_frame
        skip = of_frames._FrameAction.SKIP
        strategy = of_frames._FrameExecStrategy(skip, skip)
        of_frames.set_code_exec_strategy(function.__code__, strategy)
        # Where it is called by code that is compiled: the graph ends before the call.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
