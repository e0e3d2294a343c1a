"""Logits and gradients of all weights, compared with Hugging Face transformers in float32 on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.hf_folders import (
  MODELS,
  losses_and_gradients,
  random_params,
  relative,
  to_hugging_face,
  transformers_config,
)
from tests.support.hf_folders import model as config
from tests.support.seeds import few

from trainer.config.schema import ModelSection
from trainer.kernels import attention, projection
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oldest

T = 96


def oracle(cfg: ModelSection):
  """Returns the transformers model of the same shape."""
  kind = transformers.Qwen3ForCausalLM if cfg.use_qk_norm else transformers.LlamaForCausalLM
  return kind(transformers_config(cfg)).float()


# Every model, and one of each kind with the other loop over layers and with the other attention.
CASES = [(name, "scan") for name in MODELS if "moe" not in name]  # test_experts_against_transformers.py
CASES += [(name, variant) for name in ("qwen3", "llama3.1") for variant in ("loop", "flash")]


# Both families, with a tied head and with each scaling of the positions; each other way of computing once.
FEW = [(name, "scan") for name in ("qwen3", "llama2", "llama3.2")]
FEW += [("qwen3", "flash"), ("llama3.1", "loop")]


@pytest.mark.parametrize(("name", "variant"), few(FEW, CASES))
def test_logits_and_gradients(name, variant):
  cfg = config(name, scan_layers=variant != "loop")
  kernel = "flash" if variant == "flash" else "dot_product"
  shape = attention.Shape("cpu", None, cfg.head_dim, T, 4, cfg.num_kv_heads, jnp.dtype(cfg.dtype))
  attn = attention.choose(kernel, shape)
  model = DecoderFunctions(cfg, Kernels(attn, project=projection.choose("cpu", "")))
  params = random_params(cfg)
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T + 1))
  inputs, targets = tokens[:, :-1], tokens[:, 1:]

  theirs = oracle(cfg)
  weights = {key: torch.from_numpy(np.array(value)) for key, value in to_hugging_face(params, cfg).items()}
  missing, unexpected = theirs.load_state_dict(weights, strict=False)
  assert not unexpected and set(missing) <= {"lm_head.weight"}
  output = theirs(torch.from_numpy(inputs)).logits
  loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), torch.from_numpy(targets).flatten())
  loss.backward()

  value, logits, grads = losses_and_gradients(model, params, inputs, targets)
  assert relative(np.asarray(logits), output.detach().numpy()) < 1e-4
  assert abs(float(value) / inputs.size - loss.item()) < 1e-5 * loss.item()
  ours = to_hugging_face(jax.tree.map(lambda grad: grad / inputs.size, grads), cfg)
  for key, parameter in theirs.named_parameters():
    if key == "lm_head.weight" and cfg.logits_via_embedding:
      continue
    assert relative(ours[key], parameter.grad.numpy()) < 1e-4, key
