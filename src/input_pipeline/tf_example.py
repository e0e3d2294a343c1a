"""The features of a serialized tf.train.Example, without TensorFlow."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from input_pipeline import record
from input_pipeline.documents import Document

# A map is a repeated message with key and value on the wire.
_DESCRIPTION = """
name: "example" package: "input_pipeline" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "texts" number: 1 type: TYPE_MESSAGE type_name: "Bytes" oneof_index: 0 }
  field { name: "floats" number: 2 type: TYPE_MESSAGE type_name: "Floats" oneof_index: 0 }
  field { name: "integers" number: 3 type: TYPE_MESSAGE type_name: "Integers" oneof_index: 0 } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: "Entry" label: LABEL_REPEATED } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""


def document(serialized: bytes, name: str) -> Document:
  """The document in the feature `name`: a text (one UTF-8 string), or token ids.

  Raises ValueError if the record is not an Example, or its feature is absent or of another type.
  """
  message, problem = _message()
  try:
    entries = message.FromString(serialized).features.feature
  except problem:
    raise ValueError("not a tf.train.Example") from None
  if not entries:
    raise ValueError(f"no feature {name}: it has no features. Is it a tf.train.Example?")
  wanted = record.BESIDE | {name}
  return record.of_fields({one.key: _value(one.value) if one.key in wanted else None for one in entries}, name)


def _value(feature: Any) -> Any:
  kind = feature.WhichOneof("kind")
  if kind is None:
    return []
  values = getattr(feature, kind).value
  if kind == "texts":
    return values[0] if len(values) == 1 else list(values)
  return np.array(values, np.float32 if kind == "floats" else np.int64)


@functools.cache
def _message() -> tuple[Any, type[Exception]]:
  """(class of an Example, what parsing raises)."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format  # 50 ms

  pool = descriptor_pool.DescriptorPool()
  pool.Add(text_format.Parse(_DESCRIPTION, descriptor_pb2.FileDescriptorProto()))
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("input_pipeline.Example")), message.DecodeError
