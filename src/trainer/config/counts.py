"""Parameters, floating-point operations and sizes that follow from the keys alone."""

from __future__ import annotations

from trainer.config.schema import ModelSection


def examples_per_slice(per_device_batch_size: float, devices: int) -> int:
  """Examples in one slice's micro-batch; 0 where that is not a whole number of at least 1.

  A share such as 0.3333333 of three devices' example is meant to be a third.
  """
  rows = per_device_batch_size * devices
  return round(rows) if abs(rows - round(rows)) <= 1e-6 else 0


def shares_that_are_whole(devices: int) -> str:
  """Names the values of per_device_batch_size that `examples_per_slice` takes, for a message."""
  return f"a multiple of 1/{devices}" if devices > 1 else "a whole number"


def parameter_count(model: ModelSection) -> int:
  """Parameters of the decoder; a tied embedding counts once."""
  tables = 1 if model.logits_via_embedding else 2
  norms = 2 * model.emb_dim + (2 * model.head_dim if model.use_qk_norm else 0)
  per_layer = _layer_matmul_parameters(model) + norms
  return tables * model.vocab_size * model.emb_dim + model.num_decoder_layers * per_layer + model.emb_dim


def flops_per_token(model: ModelSection, sequence_length: int) -> float:
  """Model FLOPs of one training step per token, forward and backward, at T = sequence_length.

  6 per parameter of a matmul (2 forward, 4 backward), the output head included, the embedding lookup and the norms
  not; and 12 L N H T for the two attention matmuls over the whole square, halved because attention is causal. What
  remat computes again is not counted: this is the numerator of MFU, not of hardware utilisation.
  """
  matmuls = model.num_decoder_layers * _layer_matmul_parameters(model) + model.vocab_size * model.emb_dim
  attention = 12 * model.num_decoder_layers * model.num_query_heads * model.head_dim * sequence_length / 2
  return 6.0 * matmuls + attention


def _layer_matmul_parameters(model: ModelSection) -> int:
  """Weights of one layer's matmuls: queries and output D N H, keys and values D K H, SwiGLU 3 D F."""
  heads = 2 * model.num_query_heads + 2 * model.num_kv_heads
  return model.emb_dim * heads * model.head_dim + 3 * model.emb_dim * model.mlp_dim
