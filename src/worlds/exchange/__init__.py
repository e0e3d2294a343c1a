"""Sums of gradients between slices that are separate JAX worlds: outside XLA, over TCP. Start reading at exchange.py.

A lost member never enters XLA: it is a broken connection, PeerLost. Imports only NumPy, ml_dtypes, JAX and the standard
library.
"""

from worlds.exchange.exchange import Exchange
from worlds.exchange.exchange_errors import MismatchedCall, PeerLost, Unreachable
from worlds.exchange.layout import FlatLayout, HostCopy, Part

__all__ = ["Exchange", "FlatLayout", "HostCopy", "MismatchedCall", "Part", "PeerLost", "Unreachable"]
