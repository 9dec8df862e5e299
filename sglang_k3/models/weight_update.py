"""New weights for a running server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_k3.architectures import is_kimi

logger = logging.getLogger(__name__)


def update_from_disk(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, *rest: Any, **named: Any
) -> tuple[bool, str]:
    """AROUND hook on SGLang's update from a folder: a checkpoint that does not fit leaves the old weights.

    SGLang then reads the weights again, but from the folder that it has just been told of; what did not fit
    does not fit a second time, and ends the scheduler.
    """
    before = updater.model_config.model_path
    if not is_kimi(updater.model_config):
        return original(updater, model_path, *rest, **named)
    try:
        return original(updater, model_path, *rest, **named)
    except Exception as error:
        logger.exception("%s does not fit: the weights of %s are read again", model_path, before)
        done, message = original(updater, before, *rest, **named)
        if not done:
            raise RuntimeError(f"{before}: {message}") from error
        return False, f"Failed to update weights: {error}. Those of {before} are served."
