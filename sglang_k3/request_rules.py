"""Requests that the text model cannot serve are refused before they reach the scheduler."""

from __future__ import annotations

from sglang_k3.architectures import is_kimi

_MEDIA = ("image", "video", "audio")


def check_request(original, manager, obj, input_ids) -> None:
    """AROUND hook on the tokenizer manager's own validation. Raises ValueError (HTTP 400)."""
    original(manager, obj, input_ids)
    config = manager.model_config
    if not is_kimi(config):
        return
    for kind in _MEDIA:
        if getattr(obj, f"{kind}_data", None):
            raise ValueError(
                f"this server runs Kimi K3's text model only (language_model_only): {kind} input is refused"
            )
    # An id outside the table ends the scheduler process on a CPU, and with it every other request.
    for token in input_ids or ():
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {config.vocab_size} tokens")
