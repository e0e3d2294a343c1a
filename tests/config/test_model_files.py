"""The files of configs/models equal the published models: each weight of the transformers class, and the known size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainer.config import load
from trainer.config.config_files import package_root
from trainer.config.counts import flops_per_token, parameter_count
from trainer.config.schema import ModelSection

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oldest


@dataclass(frozen=True)
class Published:
  """Values of the published model that its shapes do not show."""

  parameters: int
  max_positions: int
  theta: float
  epsilon: float
  tied: bool
  rope_factor: float | None = None


MODELS = {
  "qwen3-0.6b": Published(596_049_920, 40960, 1e6, 1e-6, True),
  "qwen3-1.7b": Published(1_720_574_976, 40960, 1e6, 1e-6, True),
  "qwen3-4b": Published(4_022_468_096, 40960, 1e6, 1e-6, True),
  "qwen3-8b": Published(8_190_735_360, 40960, 1e6, 1e-6, False),
  "qwen3-14b": Published(14_768_307_200, 40960, 1e6, 1e-6, False),
  "qwen3-32b": Published(32_762_123_264, 40960, 1e6, 1e-6, False),
  "qwen3-30b-a3b": Published(30_532_122_624, 40960, 1e6, 1e-6, False),
  "qwen3-235b-a22b": Published(235_093_634_560, 40960, 5e6, 1e-6, False),
  "llama2-7b": Published(6_738_415_616, 4096, 1e4, 1e-5, False),
  "llama3-8b": Published(8_030_261_248, 8192, 5e5, 1e-5, False),
  "llama3-70b": Published(70_553_706_496, 8192, 5e5, 1e-5, False),
  "llama3.1-8b": Published(8_030_261_248, 131072, 5e5, 1e-5, False, 8.0),
  "llama3.1-70b": Published(70_553_706_496, 131072, 5e5, 1e-5, False, 8.0),
  "llama3.1-405b": Published(405_853_388_800, 131072, 5e5, 1e-5, False, 8.0),
  "llama3.2-1b": Published(1_235_814_400, 131072, 5e5, 1e-5, True, 32.0),
  "llama3.2-3b": Published(3_212_749_824, 131072, 5e5, 1e-5, True, 32.0),
  "llama3.3-70b": Published(70_553_706_496, 131072, 5e5, 1e-5, False, 8.0),
}


def model_section(name: str, *keys: str) -> ModelSection:
  return load(["configs/base.yml", f"model_name={name}", *keys]).model


def transformers_model(model: ModelSection) -> torch.nn.Module:
  """The transformers model with these keys, without memory for its weights."""
  rope = {"rope_type": model.rope_type, "rope_theta": model.rope_max_timescale}
  if model.rope_type == "llama3":
    rope |= {
      "factor": model.rope_scaling_factor,
      "low_freq_factor": model.rope_low_freq_factor,
      "high_freq_factor": model.rope_high_freq_factor,
      "original_max_position_embeddings": model.rope_original_max_position_embeddings,
    }
  experts = {}
  if model.num_experts > 1:
    experts = {
      "num_experts": model.num_experts,
      "num_experts_per_tok": model.num_experts_per_tok,
      "moe_intermediate_size": model.moe_mlp_dim,
      "decoder_sparse_step": model.decoder_sparse_step,
      "mlp_only_layers": model.dense_layers,
    }
  family = "Qwen3Moe" if experts else "Qwen3" if model.use_qk_norm else "Llama"
  config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
  config = config_class(
    hidden_size=model.emb_dim,
    num_hidden_layers=model.num_decoder_layers,
    num_attention_heads=model.num_query_heads,
    num_key_value_heads=model.num_kv_heads,
    head_dim=model.head_dim,
    intermediate_size=model.mlp_dim,
    vocab_size=model.vocab_size,
    max_position_embeddings=model.max_position_embeddings,
    rms_norm_eps=model.normalization_layer_epsilon,
    tie_word_embeddings=model.logits_via_embedding,
    initializer_range=model.initializer_range,
    rope_parameters=rope,
    attn_implementation="eager",
    **experts,
  )
  with torch.device("meta"):
    return model_class(config)


def implied_shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
  """transformers' weights [out, in] as the keys imply them."""
  width, heads, kv_heads = model.emb_dim, model.num_query_heads * model.head_dim, model.num_kv_heads * model.head_dim
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (model.vocab_size, width),
    "model.norm.weight": (width,),
  }
  if not model.logits_via_embedding:
    shapes["lm_head.weight"] = (model.vocab_size, width)
  for index in range(model.num_decoder_layers):
    layer = {
      "self_attn.q_proj.weight": (heads, width),
      "self_attn.k_proj.weight": (kv_heads, width),
      "self_attn.v_proj.weight": (kv_heads, width),
      "self_attn.o_proj.weight": (width, heads),
      "input_layernorm.weight": (width,),
      "post_attention_layernorm.weight": (width,),
    }
    if model.has_experts(index):
      E, F = model.num_experts, model.moe_mlp_dim
      layer |= {"mlp.gate.weight": (E, width), "mlp.experts.gate_up_proj": (E, 2 * F, width)}
      layer |= {"mlp.experts.down_proj": (E, width, F)}
    else:
      layer |= {f"mlp.{part}_proj.weight": (model.mlp_dim, width) for part in ("gate", "up")}
      layer |= {"mlp.down_proj.weight": (width, model.mlp_dim)}
    if model.use_qk_norm:
      layer |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
    shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
  return shapes


def test_every_model_file_has_published_values():
  assert {path.stem for path in (package_root() / "configs/models").glob("*.yml")} == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_size_equal_the_transformers_class_and_the_published_size(name):
  model = model_section(name)
  weights = {key: tuple(weight.shape) for key, weight in transformers_model(model).named_parameters()}
  assert weights == implied_shapes(model)
  assert sum(torch.Size(shape).numel() for shape in weights.values()) == parameter_count(model)
  assert parameter_count(model) == MODELS[name].parameters


@pytest.mark.parametrize("name", MODELS)
def test_other_values_equal_the_published_values(name):
  model, published = model_section(name), MODELS[name]
  assert model.max_position_embeddings == published.max_positions
  assert model.rope_max_timescale == published.theta
  assert model.normalization_layer_epsilon == published.epsilon
  assert model.logits_via_embedding == published.tied
  assert model.use_qk_norm == name.startswith("qwen3")
  assert model.initializer_range == 0.02
  assert (model.rope_type == "llama3") == (published.rope_factor is not None)
  if published.rope_factor is not None:
    scaling = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_original_max_position_embeddings)
    assert (model.rope_scaling_factor, *scaling) == (published.rope_factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3.2-1b", "llama3-8b"])
def test_flops_equal_the_count_of_torch(name):
  length = 64
  keys = ["override_model_config=true", "base_num_decoder_layers=3", "vocab_size=1000"]
  model = model_section(name, *keys)
  counter = flop_counter.FlopCounterMode(display=False)
  with counter, torch.device("meta"):
    tokens, mask = torch.zeros((1, length), dtype=torch.long), torch.zeros((1, 1, length, length))
    transformers_model(model)(tokens, attention_mask=mask, use_cache=False)
  square = 4 * model.num_decoder_layers * model.num_query_heads * model.head_dim * length
  # In the forward pass torch counts the whole square of attention, of which half is masked. Backward is twice forward.
  expected = 3 * (counter.get_total_flops() / length - square / 2)
  # torch computes the rotary angles by a matmul without weights: H/2 multiply-adds per token.
  assert flops_per_token(model, length) == pytest.approx(expected, rel=1e-5)


def test_a_scaled_model_counts_its_scaled_sizes():
  small = parameter_count(load(["configs/base.yml"]).model)
  assert parameter_count(load(["configs/base.yml", "global_parameter_scale=8"]).model) == pytest.approx(
    8 * small, rel=0.5
  )
