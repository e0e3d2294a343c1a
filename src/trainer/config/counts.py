"""Numbers that the keys alone determine: parameters, floating-point operations, batch sizes."""

from __future__ import annotations

from trainer.config.schema import ModelSection


def examples_per_slice(per_device_batch_size: float, devices: int) -> int:
  """Number of examples in a slice's micro-batch; 0 if it is not a whole number of at least 1.

  A rounded share such as 0.3333333 with three devices counts as one third.
  """
  rows = per_device_batch_size * devices
  return round(rows) if abs(rows - round(rows)) <= 1e-6 else 0


def valid_batch_sizes(devices: int) -> str:
  """The values of per_device_batch_size for which `examples_per_slice` is not 0, in words for a message."""
  return f"a multiple of 1/{devices}" if devices > 1 else "a whole number"


def parameter_count(model: ModelSection) -> int:
  """Number of parameters of the decoder. A tied embedding counts once."""
  tables = 1 if model.logits_via_embedding else 2
  norms = 2 * model.emb_dim + (2 * model.head_dim if model.use_qk_norm else 0)
  layers = _layers_matmul_parameters(model, model.num_experts) + model.num_decoder_layers * norms
  return tables * model.vocab_size * model.emb_dim + layers + model.emb_dim


def active_parameter_count(model: ModelSection) -> int:
  """Number of parameters that compute one token: with experts, only k of them count."""
  idle = _layers_matmul_parameters(model, model.num_experts)
  return parameter_count(model) - idle + _layers_matmul_parameters(model, model.num_experts_per_tok)


def flops_per_token(model: ModelSection, sequence_length: int) -> float:
  """Model FLOPs of one training step per token, forward and backward, at T = sequence_length.

  The sum of two parts: 6 per active parameter of a matmul (2 forward, 4 backward), with the output head and without the
  embedding lookup and the norms; and 12 L N H T / 2 for the two attention matmuls, which are causal and so need half of
  the square. Recomputation by remat is not counted: this is the numerator of MFU, not of hardware utilisation.
  """
  matmuls = _layers_matmul_parameters(model, model.num_experts_per_tok) + model.vocab_size * model.emb_dim
  attention = 12 * model.num_decoder_layers * model.num_query_heads * model.head_dim * sequence_length / 2
  return 6.0 * matmuls + attention


def _layers_matmul_parameters(model: ModelSection, experts: int) -> int:
  """Number of weights in the matmuls of all layers, with so many of the experts of a layer that has some.

  Queries and output have D N H, keys and values D K H, a SwiGLU 3 D F, and a router D E.
  """
  layers, D = model.num_decoder_layers, model.emb_dim
  sparse = sum(map(model.has_experts, range(layers)))
  heads = (2 * model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
  dense = (layers - sparse) * 3 * model.mlp_dim
  return D * (layers * heads + dense + sparse * (3 * experts * model.moe_mlp_dim + model.num_experts))
