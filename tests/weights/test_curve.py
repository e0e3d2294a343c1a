"""Training that continues from an imported model, against transformers with torch's AdamW on the same batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml
from tests.support import hf_folders
from tests.support.seeds import few

import trainer

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = [pytest.mark.oldest, pytest.mark.timeout(900)]

PEAK, DECAY, CLIP, BETAS, EPSILON = 1e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
WARMUP, FINAL = 0.1, 0.1  # shares of the steps and of PEAK


def rate(step: int, steps: int) -> float:
  """The learning rate of step 1, 2, ...: a linear warm-up, then a cosine."""
  warmup = round(steps * WARMUP)
  if step <= warmup:
    return PEAK * step / warmup
  progress = (step - 1 - warmup) / (steps - warmup)
  return PEAK * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * progress)))


def losses_of_torch(folder, batches, steps: int) -> list[float]:
  torch.set_num_threads(1)  # for so small a model, threads wait for one another most of the time
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
  embedding = model.get_input_embeddings().weight
  decays = lambda weight: weight.dim() > 1 and weight is not embedding
  groups = [
    {"params": [w for w in model.parameters() if decays(w) is yes], "weight_decay": DECAY * yes}
    for yes in (True, False)
  ]
  optimizer, losses = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON), []
  for step in range(1, steps + 1):
    batch = next(batches)
    tokens, targets, weights, positions, segments = (torch.tensor(np.asarray(field)) for field in batch)
    length = tokens.shape[1]
    sees = (segments[:, :, None] == segments[:, None]) & torch.tril(torch.ones(length, length, dtype=torch.bool))
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none")
    loss = (each * weights.flatten()).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
      group["lr"] = rate(step, steps)
    optimizer.step()
    losses.append(loss.item())
  return losses


@pytest.mark.parametrize(
  ("name", "steps"),
  few([("qwen3-tied", 20)], [(name, steps) for name in ("qwen3-tied", "llama3.1", "qwen3-moe") for steps in (20, 300)]),
)
def test_the_curve_is_that_of_transformers(tmp_path, name, steps):
  # transformers' loss for the balance of experts has the load of the step itself, ours has the load of the step before.
  model = hf_folders.model(name, vocab_size=258, load_balance_loss_weight=0)
  hf_folders.write_folder(tmp_path / "hf", model)
  (tmp_path / "model.yml").write_text(yaml.safe_dump(model.model_dump(mode="json", exclude_defaults=True)))
  (tmp_path / "text.txt").write_text("\n\n".join(f"{i} times {i} is {i * i}." for i in range(900)))
  config = trainer.load(
    "configs/base.yml",
    model_name=str(tmp_path / "model.yml"),
    run_name="run",
    base_output_directory=str(tmp_path),
    load_parameters_path=str(tmp_path / "hf"),
    dataset_type="text",
    dataset_path=str(tmp_path / "text.txt"),
    dataset_cache_directory=str(tmp_path / "data"),
    jax_cache_dir="",
    tokenizer_type="byte",
    max_target_length=32,
    per_device_batch_size=4,
    steps=steps,
    learning_rate=PEAK,
    adam_weight_decay=DECAY,
    gradient_clipping_threshold=CLIP,
    warmup_steps_fraction=WARMUP,
    learning_rate_final_fraction=FINAL,
    enable_checkpointing=False,
    enable_report=False,
    eval_steps=0,
    devices_per_slice=1,
    num_slices=1,
  )
  run, records = trainer.Run(config), []
  expected = losses_of_torch(tmp_path / "hf", iter(run.loader()), steps)
  run.train([records.append])
  found = np.array([record.loss for record in records])
  assert expected[-1] < 0.8 * expected[0], "it learns"
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
