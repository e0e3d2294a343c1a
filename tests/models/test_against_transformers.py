"""Logits and gradients of all weights, compared with Hugging Face transformers in float32 on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config.schema import ModelSection
from trainer.kernels import attention, projection
from trainer.models.decoder import DecoderFunctions
from trainer.models.huggingface import from_hugging_face, to_hugging_face
from trainer.models.layers import Kernels

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oldest

TINY = {
  "base_emb_dim": 64,
  "base_num_decoder_layers": 3,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 96,
  "head_dim": 16,
  "vocab_size": 199,
  "dtype": "float32",
  "remat_policy": "none",
  # Larger than the default, so that the logits depend on the layers and not mostly on the embedding.
  "initializer_range": 0.2,
}
LLAMA31 = {
  "use_qk_norm": False,
  "rope_max_timescale": 500000.0,
  "rope_type": "llama3",
  "rope_original_max_position_embeddings": 24,  # shorter than the sequence, so that all three cases of the rule occur
}
MODELS = {
  "qwen3": {"use_qk_norm": True, "rope_max_timescale": 1e6},
  "qwen3-tied": {"use_qk_norm": True, "rope_max_timescale": 1e6, "logits_via_embedding": True, "head_dim": 32},
  "llama2": {"use_qk_norm": False, "base_num_kv_heads": 4, "normalization_layer_epsilon": 1e-5},
  "llama3": {"use_qk_norm": False, "rope_max_timescale": 500000.0, "normalization_layer_epsilon": 1e-5},
  "llama3.1": LLAMA31,
  "llama3.2": {**LLAMA31, "rope_scaling_factor": 32.0, "logits_via_embedding": True},
}
T = 96


def config(name: str, **changes) -> ModelSection:
  return ModelSection(**{**TINY, **MODELS[name], **changes})


def oracle(cfg: ModelSection):
  """Returns the transformers model of the same shape."""
  rope = {"rope_type": "default", "rope_theta": cfg.rope_max_timescale}
  if cfg.rope_type == "llama3":
    rope |= {
      "rope_type": "llama3",
      "factor": cfg.rope_scaling_factor,
      "low_freq_factor": cfg.rope_low_freq_factor,
      "high_freq_factor": cfg.rope_high_freq_factor,
      "original_max_position_embeddings": cfg.rope_original_max_position_embeddings,
    }
  shared = {
    "vocab_size": cfg.vocab_size,
    "hidden_size": cfg.emb_dim,
    "intermediate_size": cfg.mlp_dim,
    "num_hidden_layers": cfg.num_decoder_layers,
    "num_attention_heads": cfg.num_query_heads,
    "num_key_value_heads": cfg.num_kv_heads,
    "head_dim": cfg.head_dim,
    "rms_norm_eps": cfg.normalization_layer_epsilon,
    "tie_word_embeddings": cfg.logits_via_embedding,
    "max_position_embeddings": 4096,
    "rope_theta": cfg.rope_max_timescale,
    "rope_scaling": rope,
    "attn_implementation": "eager",
  }
  if cfg.use_qk_norm:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared)).float()
  return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared)).float()


def random_weights(model: DecoderFunctions, cfg: ModelSection):
  """Returns weights drawn by numpy, because to compile the real initialization takes as long as the step."""
  rng = np.random.default_rng(7)

  def draw(path, leaf):
    if "scale" in jax.tree_util.keystr(path):  # of a norm: not 1, so that a wrong scale changes the result
      return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    return jnp.asarray(cfg.initializer_range * rng.standard_normal(leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# Every model, and one of each kind with the other loop over layers and with the other attention.
CASES = [(name, "scan") for name in MODELS]
CASES += [(name, variant) for name in ("qwen3", "llama3.1") for variant in ("loop", "flash")]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits_and_gradients(name, variant):
  cfg = config(name, scan_layers=variant != "loop")
  kernel = "flash" if variant == "flash" else "dot_product"
  attn = attention.choose(
    kernel, platform="cpu", mesh=None, head_dim=cfg.head_dim, seq_len=T, num_q_heads=4, num_kv_heads=cfg.num_kv_heads
  )
  model = DecoderFunctions(cfg, Kernels(attn, projection.choose("cpu", "")))
  params = random_weights(model, cfg)
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T + 1))
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  positions = np.broadcast_to(np.arange(T), inputs.shape)

  theirs = oracle(cfg)
  weights = {key: torch.from_numpy(np.array(value)) for key, value in to_hugging_face(params, cfg).items()}
  missing, unexpected = theirs.load_state_dict(weights, strict=False)
  assert not unexpected and set(missing) <= {"lm_head.weight"}
  output = theirs(torch.from_numpy(inputs)).logits
  loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), torch.from_numpy(targets).flatten())
  loss.backward()

  @jax.jit
  def run(params):
    def mean_loss(params):
      logits = model.merge(params).logits(
        jnp.asarray(inputs), jnp.asarray(positions), jnp.ones(inputs.shape, jnp.int32)
      )
      log_probs = jax.nn.log_softmax(logits)
      return -jnp.mean(jnp.take_along_axis(log_probs, jnp.asarray(targets)[..., None], axis=-1)), logits

    (value, logits), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return value, logits, grads

  value, logits, grads = run(params)
  assert relative(np.asarray(logits), output.detach().numpy()) < 1e-4
  assert abs(float(value) - loss.item()) < 1e-5 * loss.item()
  ours = to_hugging_face(grads, cfg)
  for key, parameter in theirs.named_parameters():
    if key == "lm_head.weight" and cfg.logits_via_embedding:
      continue
    assert relative(ours[key], parameter.grad.numpy()) < 1e-4, key


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_conversion_and_back_is_exact(name, scan):
  cfg = config(name, scan_layers=scan, base_num_decoder_layers=11)  # two digits: "10" sorts before "2"
  model = DecoderFunctions(cfg, Kernels(None))
  params = random_weights(model, cfg)
  back = from_hugging_face(to_hugging_face(params, cfg), cfg)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_conversion_names_the_weight_that_does_not_fit():
  cfg = config("qwen3")
  tensors = to_hugging_face(random_weights(DecoderFunctions(cfg, Kernels(None)), cfg), cfg)
  with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
    from_hugging_face({k: v for k, v in tensors.items() if k != "model.norm.weight"}, cfg)
  with pytest.raises(ValueError, match="has no place for 1 weights"):
    from_hugging_face({**tensors, "model.extra": tensors["model.norm.weight"]}, cfg)
  with pytest.raises(ValueError, match=r"lm_head.weight has shape .* needs \(199, 64\)"):
    from_hugging_face({**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1]}, cfg)
