"""Coatcheck: a distributed multi-GPU serving cluster for large language models."""

__version__ = "0.1.0"
