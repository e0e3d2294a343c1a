"""The document in a record: a line of JSONL, a row of Arrow data, an example of TensorFlow, an element of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from input_pipeline import conversations
from input_pipeline.documents import Document, MaskedIds

# Of token ids: which of them count in the loss. The names are ours, and those of transformers and TRL.
_MASKS = ("mask", "loss_mask", "completion_mask", "assistant_masks")
_NOT_TRAINED = -100  # a label of transformers that does not count
_SAYS = ("train", "trainable", "training")  # of a record: whether it is trained
BESIDE_TEXT = frozenset((*_MASKS, *_SAYS))
"""Fields beside a text that say what is trained."""
BESIDE = conversations.BESIDE | BESIDE_TEXT | {"labels", "attention_mask"}
"""Fields beside token ids or messages that say what is trained, or would be lost."""
_ABSENT = object()


def of_fields(record: Any, column: str) -> Document:
  """The document in the field `column` of a mapping, or in nested fields (`meta.text`); null is an empty text.

  Raises ValueError if there is no such field, or as `of_value`.
  """
  if not isinstance(record, Mapping):
    raise ValueError(f"it is a {type(record).__name__}, and not a mapping of fields")
  beside, name = record, column
  while name not in beside and "." in name:
    head, _, name = name.partition(".")
    beside = beside.get(head, _ABSENT)
    if beside is None:
      return ""
    if not isinstance(beside, Mapping):
      name = ""
      break
  if not name or name not in beside:
    raise ValueError(
      f'no field "{column}"; it has {", ".join(map(str, record)) or "none"}. Set train_data_columns to the field with '
      "the document"
    )
  return of_value(beside[name], beside, f"its {column}")


def of_value(found: Any, beside: Mapping[str, Any], name: str = "it") -> Document:
  """The text, token ids as int64 [n], masked token ids, or conversation that `found` is; None is an empty text.

  beside: the other fields of the record. name: of the value, for messages. Raises ValueError for another value, and for
  a field that says what is trained and cannot be used.
  """
  for says in _SAYS:
    if isinstance(said := beside.get(says), bool | np.bool_) and not said:
      raise ValueError(f"it has {says}=false. Leave out records that must not be trained")
  if isinstance(found, bytes):
    found = found.decode()  # UnicodeDecodeError is a ValueError
  masks = {key: beside[key] for key in _MASKS if beside.get(key) is not None}
  is_chat = isinstance(found, list | tuple) and len(found) > 0 and isinstance(found[0], Mapping)
  if found is None or isinstance(found, str) or is_chat:
    if masks and found is not None:
      kind = "messages" if is_chat else "a text"
      raise ValueError(f"it has {', '.join(masks)} beside {kind}. Give the token ids that it belongs to, or remove it")
    return conversations.parse(found, beside) if is_chat else found or ""
  ids = _ids(found, name)
  marks = [_mask(key, mask, ids) for key, mask in masks.items()]
  labels = beside.get("labels")
  if labels is not None and np.ndim(labels):  # one number is the class of the whole record
    marks.append(_mask("labels", np.not_equal(labels, _NOT_TRAINED), ids))
    if (np.asarray(labels) != ids)[marks[-1]].any():
      raise ValueError("its labels are other tokens than its ids, and a target is the next id. Remove labels")
  if (padding := beside.get("attention_mask")) is not None and not _mask("attention_mask", padding, ids).all():
    raise ValueError("its attention_mask has zeros. Give token ids without padding")
  if not marks:
    return ids
  if any((mark != marks[0]).any() for mark in marks):
    raise ValueError(f"its {', '.join(masks)}{' and labels' * (len(marks) > len(masks))} contradict each other")
  if (ids < 0).any():
    raise ValueError(f"it has the token {ids.min()}")
  return MaskedIds(np.where(marks[0], ids, ~ids))


def _ids(found: Any, name: str) -> np.ndarray:
  """Token ids as int64 [n]. Raises ValueError for another value."""
  rule = "A document is a string, a list of integers, or a list of messages with role and content"
  try:
    ids = np.asarray(found)
  except ValueError:
    raise ValueError(f"{name} is a list of unlike parts. {rule}") from None
  if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
    shape = f" of {ids.dtype} with shape {ids.shape}" if ids.ndim else ""
    remedy = "; batches are made here: give the dataset before .batch" if ids.ndim > 1 else ""
    raise ValueError(f"{name} is a {type(found).__name__}{shape}. {rule}{remedy}")
  return ids.astype(np.int64)


def _mask(name: str, mask: Any, ids: np.ndarray) -> np.ndarray:
  """A mask as bool [n]. Raises ValueError if it is no list of 0 and 1, one for each id."""
  if np.shape(mask) != ids.shape:
    raise ValueError(f"its {name} has shape {np.shape(mask)}, and its ids {ids.shape}. Give a number for each id")
  if not np.isin(mask, (0, 1)).all():
    raise ValueError(f"its {name} has other values than 0 and 1. Write 1 for each id that counts in the loss")
  return np.asarray(mask) != 0
