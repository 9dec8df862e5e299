"""Stands in for packages of an Ascend host that are on no package index or need a compiler from CANN.

Importing them works, so SGLang's NPU modules import; a call says that nothing is there. What our own code
calls of them gets its own double where a test needs one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "sgl_kernel_npu", "torchair", "acl")


class Missing:
    """Any attribute of a stand-in; calling it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a stand-in: it exists on an Ascend host only")


class CompilerConfig:
    """torchair's: SGLang sets fields of it where a function is declared for compilation."""

    def __init__(self) -> None:
        self.debug = type("Debug", (), {})()


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        if module.__name__ == "torchair.configs.compiler_config":
            vars(module)["CompilerConfig"] = CompilerConfig
        if module.__name__ == "torchair":
            vars(module)["get_npu_backend"] = lambda compiler_config: "eager"


class TritonDriver:
    """What triton-ascend asks of a driver when a kernel is declared. Nothing can be launched."""

    def get_benchmarker(self) -> Any:
        return Missing("triton.testing.do_bench")

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"triton driver.{name}: there is no NPU to launch a kernel on")


def install() -> None:
    """Once a process, before SGLang is imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # transformers would take our torchvision for a real one of no version; it remembers its first look.
    from transformers.utils.import_utils import is_torchvision_available

    assert not is_torchvision_available()
    sys.meta_path.insert(0, _Finder())
    # torch_npu puts its own torchair there, which needs CANN's compiler, unless there is one.
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    importlib.import_module("torchair")
    from triton.runtime import driver

    stand_in: Any = TritonDriver()
    driver.set_active(stand_in)
