"""Everything we register with SGLang, on one screen.

SGLang calls `register` in each of its processes, before arguments are parsed. It only logs a plugin that
raises and serves on without it; a server that silently lost its Kimi K3 backend must not start. So this
function imports the standard library alone and turns any failure into SystemExit, which names it.
"""

from __future__ import annotations

import traceback


def register() -> None:
    """Entry point of group `sglang.srt.plugins`. Raises SystemExit on any failure."""
    try:
        from sglang_k3 import registration

        registration.check_version()
        registration.register()
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(
            f"sglang-k3 could not register with SGLang: {type(error).__name__}: {error}. "
            "Run `sglang-k3 doctor` to see what is wrong, or set SGLANG_PLUGINS to leave it out."
        ) from error
