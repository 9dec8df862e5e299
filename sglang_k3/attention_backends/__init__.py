"""Attention backends for the hybrid KDA / MLA models."""

NAME = "k3_cpu"
