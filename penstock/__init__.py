"""penstock: one file and one command take any open LLM from a laptop to a cluster."""

from __future__ import annotations

__version__ = "0.1.0"
