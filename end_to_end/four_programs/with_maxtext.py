"""Trains with MaxText's own train_loop, on a CPU. Runs as a script in an environment with MaxText 0.2.5.

    python with_maxtext.py FOLDER [own]

Its configuration, model, loss, optimizer, clipping, step, loop and conversion of weights are used as they are. Three
of its functions are replaced, because their inputs are not files here: the data iterator, the schedule (its warm-up
begins with a rate of 0, and its cosine ends one step earlier), and the state before the first step, which gets the
weights of the Hugging Face folder. Two differences from the other programs are switched off, except with `own`:
- A tied head is rounded to bfloat16, and its gradient too, with dtype=float32 as well (Qwen3).
- The scale of the attention scores, 1/sqrt(head_dim), is folded into the query weights, so AdamW changes these by
  sqrt(head_dim) more (Llama). Without `own` the scale is applied to the queries, as MaxText does for Qwen3.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}

import common
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
from maxtext.checkpoint_conversion.utils.utils import apply_hook_fns
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.layers import nnx_decoders
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, train_utils

NAMES = {"qwen3": "qwen3-0.6b", "llama": "llama3.1-8b"}  # of its models: the sizes are replaced


def keys(work: common.Work, hf: dict[str, Any], out: Path) -> dict[str, Any]:
  """The keys of the command line that differ from its defaults."""
  return {
    "model_name": NAMES[work.model],
    "override_model_config": True,
    "base_emb_dim": hf["hidden_size"],
    "base_num_decoder_layers": hf["num_hidden_layers"],
    "base_num_query_heads": hf["num_attention_heads"],
    "base_num_kv_heads": hf["num_key_value_heads"],
    "base_mlp_dim": hf["intermediate_size"],
    "head_dim": hf["head_dim"],
    "vocab_size": hf["vocab_size"],
    "max_target_length": work.length,
    "per_device_batch_size": work.rows,
    "steps": work.steps,
    "learning_rate": work.peak,
    "learning_rate_schedule_steps": work.schedule_steps,
    "adam_b1": work.b1,
    "adam_b2": work.b2,
    "adam_eps": work.epsilon,
    "adam_weight_decay": work.decay,
    "adamw_mask": "['scale','token_embedder']",  # its default decays every weight
    "gradient_clipping_threshold": work.clip,
    "dtype": "float32",
    "scan_layers": False,
    "remat_policy": "none",
    "attention": "dot_product",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "packing": False,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "skip_jax_distributed_system": True,
    "log_config": False,
    "run_name": "maxtext",
    "base_output_directory": out,
    "metrics_file": out / "metrics.jsonl",
  }


def batches(folder: Path) -> Iterator[dict[str, np.ndarray]]:
  """The batches of the work as MaxText's iterators give them."""
  for tokens in common.batches(folder):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    places, ones = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape), np.ones_like(inputs)
    of_inputs = {"inputs": inputs, "inputs_position": places, "inputs_segmentation": ones}
    yield of_inputs | {"targets": targets, "targets_position": places, "targets_segmentation": ones}


def hooks(work: common.Work, hf: dict[str, Any], config: Any, own: bool, saving: bool) -> dict[str, Any]:
  """Its functions that convert a weight, by the name of the weight."""
  found = dict(HOOK_FNS[NAMES[work.model]](hf, config, False, saving_to_hf=saving))
  if work.model == "llama" and not own:
    for name in found:
      if name.endswith("query-kernel"):  # the keys' functions are the same without the scale
        found[name] = found[name.replace("query", "key")]
  return found


def named(params: nnx.State) -> dict[str, nnx.Variable]:
  """The weights by their names in the tables of the conversion."""
  return {"-".join(("params", *map(str, path))): variable for path, variable in nnx.to_flat_state(params)}


def main(folder: Path, own: bool) -> None:
  """Leaves maxtext/curve.csv and maxtext/model in `folder`; with `own`, maxtext-own/..."""
  work, hf = common.read(folder), common.config_of(folder)
  out = folder / ("maxtext-own" if own else "maxtext")
  out.mkdir()
  arguments = [f"{key}={value}" for key, value in keys(work, hf, out).items()]
  config, recorder = train.initialize(["train", *arguments])
  mapping = PARAM_MAPPING[NAMES[work.model]](hf, config, False)
  theirs = safetensors.numpy.load_file(folder / "model" / "model.safetensors")
  setup = train_utils.setup_train_loop

  def setup_with_weights(*args: Any, **options: Any) -> Any:
    parts = setup(*args, **options)
    model, convert = parts[-1].model, hooks(work, hf, config, own, saving=False)
    params = nnx.state(model, nnx.Param)
    for name, variable in named(params).items():
      weight = apply_hook_fns(theirs[mapping[name]], variable.get_value().shape, convert.get(name))
      assert weight.shape == variable.get_value().shape, name
      variable.set_value(jax.device_put(jnp.asarray(weight, jnp.float32), variable.get_value().sharding))
    nnx.update(model, params)
    if work.model == "llama" and not own:
      for i in range(hf["num_hidden_layers"]):
        getattr(model.decoder, f"layers_{i}").self_attention.query_pre_attn_scalar = hf["head_dim"] ** -0.5
    return parts

  train_utils.setup_train_loop = setup_with_weights
  if not own:
    nnx_decoders.attend_on_embedding = lambda x, table, *rest: x @ table.T
  input_pipeline_interface.create_data_iterator = lambda config, mesh: (batches(folder), None)
  rates = jnp.asarray([work.rate(step) for step in range(work.steps + 1)], jnp.float32)
  maxtext_utils.create_learning_rate_schedule = lambda config: lambda step: rates[step]
  state = train.train_loop(config, recorder)

  convert, weights = hooks(work, hf, config, own, saving=True), {}
  for name, variable in named(nnx.filter_state(state["model"], nnx.Param)).items():
    one = apply_hook_fns(np.asarray(variable.get_value()), theirs[mapping[name]].shape, convert.get(name))
    weights[mapping[name]] = np.ascontiguousarray(one)
  (out / "model").mkdir()
  safetensors.numpy.save_file(weights, out / "model" / "model.safetensors")
  records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
  common.write_curve(out / "curve.csv", [(r["learning/loss"], r["learning/raw_grad_norm"]) for r in records])


if __name__ == "__main__":
  main(Path(sys.argv[1]), sys.argv[2:] == ["own"])
