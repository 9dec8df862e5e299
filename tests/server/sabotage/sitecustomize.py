"""Faults that a test plants in every process of a server, through PYTHONPATH.

K3_SABOTAGE names the fault, K3_SABOTAGE_IN the kind of process it strikes: main, scheduler, detokenizer.
Python imports this module before anything else; without the variables it does nothing.
"""

import builtins
import importlib.metadata
import os
import sys

FAULT = os.environ.get("K3_SABOTAGE", "")
WHERE = os.environ.get("K3_SABOTAGE_IN", "")
ENTRY = {"scheduler": "run_scheduler_process", "detokenizer": "run_detokenizer_process"}


def in_the_chosen_process():
    """Whether the code runs inside the process kind that the fault strikes."""
    functions = set()
    frame = sys._getframe()
    while frame is not None:
        functions.add(frame.f_code.co_name)
        frame = frame.f_back
    if WHERE == "main":
        return not functions.intersection({*ENTRY.values(), "spawn_main"})
    return ENTRY[WHERE] in functions


def other_version():
    original = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.5.22" if name == "sglang" else original(name)


def broken_import():
    """`sglang_k3.upstream` cannot be imported."""
    original = builtins.__import__

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        if name == "sglang_k3" and "upstream" in (fromlist or ()) and in_the_chosen_process():
            raise ImportError("planted: sglang_k3.upstream is broken")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded


def around_load_plugins(strike):
    """Runs `strike` where the chosen process is about to load its plugins."""
    original = builtins.__import__

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        module = original(name, globals, locals, fromlist, level)
        if name == "sglang_k3" and "upstream" in (fromlist or ()) and in_the_chosen_process():
            builtins.__import__ = original
            strike()
        return module

    builtins.__import__ = guarded


def renamed_target():
    """A function that we hook has another name in this SGLang."""

    def strike():
        from sglang.srt.utils import numa_utils

        delattr(numa_utils, "init_threads_binding")

    around_load_plugins(strike)


def lost_hook():
    """SGLang fails to apply one hook, which it only logs."""

    def strike():
        from sglang.srt.plugins.hook_registry import HookRegistry

        original = HookRegistry._apply_target.__func__

        def skip(cls, target, hooks):
            if target.endswith("attn_backend_wrapper"):
                raise RuntimeError("planted: the hook cannot be applied")
            return original(cls, target, hooks)

        setattr(HookRegistry, "_apply_target", classmethod(skip))  # noqa: B010

    around_load_plugins(strike)


def lost_registration():
    """Somebody puts SGLang's own config class back after we registered ours."""

    def strike():
        from sglang.srt.plugins.hook_registry import HookRegistry

        original = HookRegistry.apply_hooks.__func__

        def apply_and_restore(cls):
            original(cls)
            from sglang.srt.configs.kimi_linear import KimiLinearConfig
            from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

            _CONFIG_REGISTRY["kimi_linear"] = KimiLinearConfig

        setattr(HookRegistry, "apply_hooks", classmethod(apply_and_restore))  # noqa: B010

    around_load_plugins(strike)


if FAULT:
    globals()[FAULT]()
