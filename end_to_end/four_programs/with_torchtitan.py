"""Trains with torchtitan's own Trainer, on a CPU. Runs as a script in an environment with torchtitan 0.3.0.

Its model, loss, optimizer, clipping, schedule, loop and conversion of weights are used as they are. What a CPU needs
instead of its defaults: scaled dot-product attention (its language models take flex or varlen attention, and neither
has a backward pass on a CPU), no FSDP around the one device, no monitor of GPU memory and no new time limits of NCCL.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import safetensors.torch
import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan's imports: without a GPU it takes cuda

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def spec(work: common.Work, hf: dict[str, Any]) -> Any:
  """Its debug model of the family (Qwen3 with a tied head, Llama 3), with the sizes of config.json."""
  family = llama3 if work.model == "llama" else qwen3
  spec, rope, D, V = family.model_registry("debugmodel"), hf["rope_parameters"], hf["hidden_size"], hf["vocab_size"]
  sizes = {
    "n_layers": hf["num_hidden_layers"],
    "dim": D,
    "n_heads": hf["num_attention_heads"],
    "n_kv_heads": hf["num_key_value_heads"],
    "hidden_dim": hf["intermediate_size"],
    "attn_backend": "flex",
  }
  angles = {"dim": hf["head_dim"], "max_seq_len": work.length, "theta": rope["rope_theta"]}
  model = spec.model
  if family is llama3:
    scaling = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    angles |= {"scaling": "llama", "scaling_factor": rope["factor"]} | {name: rope[name] for name in scaling}
    model.layers = llama3._build_llama3_layers(**sizes, rope=ComplexRoPE.Config(**angles))
  else:
    model.layers = qwen3._build_qwen3_layers(**sizes, head_dim=hf["head_dim"], rope=CosSinRoPE.Config(**angles))
  for layer in model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
  model.dim, model.vocab_size, model.norm.normalized_shape = D, V, D
  model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = V, D
  model.lm_head.in_features, model.lm_head.out_features = D, V
  assert (model.norm.eps, model.enable_weight_tying) == (hf["rms_norm_eps"], hf["tie_word_embeddings"])
  return dataclasses.replace(spec, parallelize_fn=lambda model, **kwargs: model)


def batches(folder: Path) -> Any:
  for batch in common.batches(folder):
    tokens = torch.tensor(batch, dtype=torch.long)
    yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def config(folder: Path, work: common.Work, hf: dict[str, Any]) -> Trainer.Config:
  adamw = lambda pattern, decay: ParamGroupConfig(
    pattern=pattern,
    optimizer_name="AdamW",
    optimizer_kwargs={"lr": work.peak, "betas": (work.b1, work.b2), "eps": work.epsilon, "weight_decay": decay},
  )
  # Its recipes decay every weight. A tied head has the name of the embedding.
  groups = [adamw("norm|tok_embeddings", 0.0), adamw(".*", work.decay)]
  return Trainer.Config(
    model_spec=spec(work, hf),
    hf_assets_path=str(folder / "model"),
    dump_folder=str(folder / "torchtitan"),
    loss=CrossEntropyLoss.Config(),
    metrics=metrics.MetricsProcessor.Config(log_freq=1),
    tokenizer=SimpleNamespace(build=lambda **kwargs: None),
    dataloader=SimpleNamespace(build=lambda **kwargs: batches(folder)),
    optimizer=OptimizersContainer.Config(implementation="foreach", param_groups=groups),
    lr_scheduler=LRSchedulersContainer.Config(
      warmup_steps=work.warmup, total_steps=work.schedule_steps, decay_type="cosine", min_lr_factor=work.final
    ),
    training=TrainingConfig(
      local_batch_size=work.rows,
      seq_len=work.length,
      max_norm=work.clip,
      steps=work.steps,
      disable_cuda_graphs=True,
      mixed_precision_param="float32",
    ),
    checkpoint=CheckpointManager.Config(enable=False),
  )


def main(folder: Path) -> None:
  """Leaves torchtitan/curve.csv and torchtitan/model in `folder`."""
  out = folder / "torchtitan"
  torch.set_num_threads(1)
  os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
  no_memory = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
  metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="CPU", get_peak_stats=lambda: no_memory, reset_peak_stats=lambda: None
  )
  utils.set_pg_timeouts = lambda **kwargs: None  # its barrier names a GPU
  curve: list[tuple[float, float]] = []
  metrics.MetricsProcessor.log = lambda self, step, loss, most, norm, **more: curve.append((loss, norm))
  trainer = config(folder, common.read(folder), common.config_of(folder)).build()
  (model,) = trainer.model_parts
  adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, str(folder / "model"))
  model.load_state_dict(adapter.from_hf(safetensors.torch.load_file(folder / "model" / "model.safetensors")))
  trainer.train()
  (out / "model").mkdir(parents=True)
  weights = {name: weight.contiguous() for name, weight in adapter.to_hf(model.state_dict()).items()}
  safetensors.torch.save_file(weights, out / "model" / "model.safetensors")
  common.write_curve(out / "curve.csv", curve)
  trainer.close()
  torch.distributed.destroy_process_group()


if __name__ == "__main__":
  main(Path(sys.argv[1]))
