"""The safetensors format: 8 bytes with the length of a JSON header, the header, then the bytes of all tensors.

Read by byte ranges and written in one pass, so that no more than the wanted part of a tensor is in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from input_pipeline.places import Place
from trainer.config.errors import ConfigError
from trainer.weights import hf_config

DTYPES: dict[str, np.dtype[Any]] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the limit of Hugging Face's own reader
_BLOCK = 4 << 20  # values that are written at once


@dataclass(frozen=True)
class Tensor:
  path: Place
  offset: int  # of its first byte
  shape: tuple[int, ...]
  dtype: np.dtype

  def array(self) -> np.ndarray:
    """The values, read-only. A local file is mapped: bytes are read where they are used."""
    if "://" not in str(self.path):
      return np.memmap(str(self.path), self.dtype, "r", self.offset, self.shape)
    with self.path.open("rb") as file:
      file.seek(self.offset)
      return np.frombuffer(file.read(math.prod(self.shape) * self.dtype.itemsize), self.dtype).reshape(self.shape)


def read(path: Place) -> dict[str, Tensor]:
  """{name: tensor} of a file. Reads its header only.

  Raises ConfigError unless the header is whole and its tensors fill the file exactly.
  """
  try:
    with path.open("rb") as file:
      head, total = file.read(8), path.stat().size
      length = struct.unpack("<Q", head)[0] if len(head) == 8 else total
      if length > min(_LONGEST_HEADER, total - 8):
        raise ConfigError(f"{path}: is no safetensors file, or is truncated ({total} bytes). Get the file again.")
      header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
      begin, stop = entry["data_offsets"]
      if entry["dtype"] not in DTYPES:
        raise ConfigError(
          f"{path}: {name} is {entry['dtype']}, as in a quantized model. Only {', '.join(DTYPES)} can be read. "
          f"{hf_config.DEQUANTIZE}"
        )
      dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
      if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
        raise ConfigError(f"{path}: the bytes {begin} to {stop} of {name} do not fit its shape. Get it again.")
      found[name], end = Tensor(path, 8 + length + begin, shape, dtype), stop
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    if isinstance(error, ConfigError):
      raise
    raise ConfigError(f"{path}: its header cannot be read: {error!r}. Get the file again.") from error
  if 8 + length + end != total:
    raise ConfigError(f"{path}: has {total} bytes instead of {8 + length + end}: it is truncated. Get the file again.")
  return found


def header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
  """The first bytes of a file of these tensors, which follow in the same order."""
  entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
  end = 0
  for name, (dtype, shape) in tensors.items():
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
  body = json.dumps(entries).encode()
  body += b" " * (-len(body) % 8)
  return struct.pack("<Q", len(body)) + body


def write(file: Any, array: np.ndarray, dtype: np.dtype, name: str) -> None:
  """Appends the values of `array`, in C order, as `dtype`. Raises ConfigError if a value does not fit."""
  flat = array.reshape(-1)
  for begin in range(0, flat.size, _BLOCK):
    block = flat[begin : begin + _BLOCK]
    if block.dtype != dtype:
      with np.errstate(over="ignore"):
        block = block.astype(dtype)
      if not np.isfinite(block).all():
        raise ConfigError(f"{name} has values that {dtype} cannot hold. Use bfloat16 or float32.")
    file.write(block.view(np.uint8).data)
