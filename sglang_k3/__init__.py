"""Kimi K3 on stock SGLang: Ascend NPUs in production, plain CPUs for development and CI."""

__version__ = "0.1.0"
