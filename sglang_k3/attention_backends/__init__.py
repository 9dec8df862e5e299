"""Attention backends for the hybrid KDA / MLA models."""
