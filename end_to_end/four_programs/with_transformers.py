"""Trains with transformers and torch. Runs as a script in an environment with both.

    python with_transformers.py FOLDER [own|rounded]

Experts are balanced by the loss of this project, or with `own` by that of transformers. `rounded` rounds a tied head to
bfloat16, as MaxText does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import common
import torch
import transformers


def main(folder: Path, option: str) -> None:
  """Leaves transformers/curve.csv and transformers/model in `folder`; with an option, transformers-{option}/..."""
  work, out = common.read(folder), folder / (f"transformers-{option}" if option else "transformers")
  out.mkdir()
  torch.set_num_threads(1)  # for so small a model, threads wait for one another most of the time
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "model", dtype=torch.float32, attn_implementation="eager"
  )
  if option == "rounded":
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x, model.lm_head.weight.bfloat16().float())
  groups = [
    {
      "params": [w for name, w in model.named_parameters() if work.decays(name) is yes],
      "weight_decay": work.decay * yes,
    }
    for yes in (True, False)
  ]
  optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(work.b1, work.b2), eps=work.epsilon)
  schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, work.rate)
  experts, load, curve = getattr(model.config, "num_experts", 0), None, []
  for batch in common.batches(folder):
    tokens = torch.tensor(batch, dtype=torch.long)
    output = model(tokens[:, :-1], output_router_logits=bool(experts), use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    total = loss
    if experts:
      balance, load, gap = balance_loss(output.router_logits, load, model.config.num_experts_per_tok)
      print(f"step {len(curve) + 1}: the last chosen expert of a token leads by at least {gap:.1e}", flush=True)
      total = loss + work.balance * (output.aux_loss if option == "own" else balance)
    optimizer.zero_grad()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
    optimizer.step()
    schedule.step()
    curve.append((loss.item(), norm.item()))
  common.write_curve(out / "curve.csv", curve)
  model.save_pretrained(out / "model")


def balance_loss(logits, load, k: int):
  """Returns the loss, the load [layers, experts] of this step, and the least lead of a chosen expert over the others.

  Each layer has E times the sum over experts of load times mean probability. The loss is the mean over layers. `load`
  is the mean number of choices per token that fell on each expert in the step before; None: all are equal.
  transformers' own loss has the load of the step itself, and multiplies means that go over all layers.
  """
  probabilities = torch.stack([layer.softmax(-1) for layer in logits])  # [layers, tokens, experts]
  E = probabilities.shape[-1]
  if load is None:
    load = torch.full((len(logits), E), k / E)
  best = probabilities.topk(k + 1)
  chosen = torch.nn.functional.one_hot(best.indices[..., :k], E).sum(2).float().mean(1)
  gap = (best.values[..., k - 1] - best.values[..., k]).min().item()
  return E * (load * probabilities.mean(1)).sum(-1).mean(), chosen, gap


if __name__ == "__main__":
  main(Path(sys.argv[1]), "".join(sys.argv[2:]))
