"""Measures what local steps cost in loss at equal tokens: replicas, steps of a round, outer values, kinds of moments.

  python -m end_to_end.benchmarks.local_steps --text input.txt [--folder runs/local_steps]
  python -m end_to_end.benchmarks.local_steps --text input.txt --check

Trains a model of 66,000 parameters on the bytes of Tiny Shakespeare (input.txt, see end_to_end/shakespeare.py) and
of Python's standard library. One process computes all replicas and three seeds at once, with the product's functions:
the step of a replica, what a replica adds to a round, the mean over replicas, and the outer step. All runs of a seed
have the same first weights, the same examples in the same order, and the same schedule; the loss is of held-out text.
One replica with the outer values 1 and 0 is the synchronous run.

The results are appended to a file, and the same command continues with what the file does not have. Then it prints
tables. Moments: "mean" is the product (averaged in each round, as in Local Adam), "own" are the moments of
DiLoCo (each replica keeps its moments), "reset" begins each round with moments of zero; the last two exist only here.
--check trains one configuration with the product, as processes, and compares its losses and its final weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tests.support.process_runs import ProcessRun

from input_pipeline.batch import Batch
from trainer.checkpoint.arrays import state_tree
from trainer.config.load import load
from trainer.program import program
from trainer.program.local_steps import Averages
from trainer.program.state import TrainState
from trainer.run import run_data

STEPS, ROWS, CHUNK = 300, 8, 10  # CHUNK: steps that one compiled program takes
SEEDS = (0, 1, 2)
EVAL_BATCHES = 100
MODEL = (
  "configs/base.yml base_emb_dim=64 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=32 "
  "base_mlp_dim=172 vocab_size=260 logits_via_embedding=true dtype=float32 remat_policy=none dataset_type=text "
  "tokenizer_type=byte max_target_length=32 attention=dot_product opt_type=adamw learning_rate=0.004 "
  "warmup_steps_fraction=0.1"
).split()
TEXTS = ("Shakespeare", "Python")
REPLICAS = (1, 2, 4, 8)


class Cell(NamedTuple):
  """One kind of run, of which there is one for each seed. rate, momentum: of the outer step. wire: see the key
  grad_reduce_dtype."""

  text: str
  replicas: int
  local_steps: int
  rate: float = 1.0
  momentum: float = 0.0
  moments: str = "mean"
  wire: str = "float32"


def cells() -> list[Cell]:
  """All cells, of each text the most important ones first: there may be time for some of them only."""
  diloco, maxtext, product = (0.7, 0.9), (0.3, 0.9), itertools.product
  found = [Cell("", number, 30) for number in (1, 4, 8, 2)]
  found += [Cell("", 4, 30, *diloco), Cell("", 4, 30, moments="own"), Cell("", 4, 30, *maxtext)]
  found += [Cell("", 4, 30, moments="reset"), Cell("", 4, 30, wire="bfloat16")]
  found += [Cell("", number, count) for number, count in product((4, 8, 2), (100, 10, 1))]
  found += [Cell("", 4, 30, *diloco, moments) for moments in ("own", "reset")] + [Cell("", 4, 30, 0.9, 0.5)]
  grid = product((4, 1, 8, 2), (30, 100, 10, 1), (diloco, maxtext))
  found += [Cell("", number, count, *outer) for number, count, outer in grid]
  return [cell._replace(text=text) for text, cell in product(TEXTS, dict.fromkeys(found))]


class Trainer:
  """Trains all seeds of a cell at once. Arrays of a state begin with [seed], of a replica with [seed, replica]."""

  def __init__(self, folder: Path, keys: Sequence[str]) -> None:
    self._folder, self._keys = folder, keys
    self._compiled: dict[Any, Any] = {}

  def config(self, cell: Cell, seed: int) -> Any:
    paths = {"dataset_path": "", "eval_dataset_path": ""}  # Python's standard library
    if cell.text == "Shakespeare":
      paths = {"dataset_path": f"{self._folder / 'train.txt'}", "eval_dataset_path": f"{self._folder / 'val.txt'}"}
    own = [f"num_slices={cell.replicas}", f"local_steps={cell.local_steps}", f"outer_learning_rate={cell.rate}"]
    own += [f"outer_momentum={cell.momentum}", f"per_device_batch_size={ROWS // cell.replicas}", f"steps={STEPS}"]
    own += [f"checkpoint_period={STEPS}", f"eval_interval={STEPS}", f"eval_steps={EVAL_BATCHES}"]
    own += [f"init_weights_seed={seed}", f"data_shuffle_seed={seed}", f"grad_reduce_dtype={cell.wire}"]
    folders = [f"dataset_cache_directory={self._folder}", f"base_output_directory={self._folder}", "run_name=run"]
    more = ["elastic_enabled=true", "sample_prompt=", f"jax_cache_dir={self._folder / 'compiled'}"]
    return [*MODEL, *(f"{key}={path}" for key, path in paths.items()), *own, *folders, *more, *self._keys]

  def train(self, cell: Cell, steps: int = STEPS) -> tuple[TrainState, list[float]]:
    """Returns the state and the evaluation loss of each seed, after `steps` steps."""
    prog, end_round = self._programs(cell.replicas, cell.rate, cell.momentum, cell.wire)
    batches, held_out = self._data(cell.text)
    with jax.set_mesh(prog.mesh):
      values, moments = prog.schedule.placed(prog.mesh), None
      start = jax.tree.map(lambda *of_seeds: jnp.stack(of_seeds), *(prog.init(jax.random.key(seed)) for seed in SEEDS))
      for first in range(0, steps, cell.local_steps):
        count = min(cell.local_steps, steps - first)
        inner = dataclasses.replace(start, outer=None)
        replicas = jax.tree.map(lambda x: jnp.repeat(x[:, None], cell.replicas, 1), inner)
        if cell.moments == "reset":
          replicas = dataclasses.replace(replicas, opt_state=jax.tree.map(jnp.zeros_like, replicas.opt_state))
        elif cell.moments == "own" and moments is not None:
          replicas = dataclasses.replace(replicas, opt_state=moments)
        replicas = self._take(cell.replicas, prog, replicas, batches, first, count, values)
        moments = jax.tree.map(jnp.copy, replicas.opt_state)  # the next steps donate the replicas
        start = end_round(start, replicas, jnp.int32(count))
      return start, self._evaluate(prog, start.params, held_out)

  @functools.cache  # noqa: B019 -- one object lives as long as the process
  def _programs(self, replicas: int, rate: float, momentum: float, wire: str) -> tuple[Any, Any]:
    """The product's program of a replica, and `_end_round` for it."""
    cell = Cell(TEXTS[0], replicas, 2, rate, momentum, wire=wire)
    config = load([*self.config(cell, 0), "cluster=multiprocess"], check_paths=False)
    prog = program.build(config, [jax.devices()[:1]], 1)
    averages = Averages.of(prog.state, prog.model, replicas)
    return prog, jax.jit(functools.partial(_end_round, averages, prog.outer, wire))

  def _take(self, number: int, prog: Any, replicas: TrainState, batches: Batch, first: int, count: int, values: Any):
    """The states of the replicas after `count` steps, the first one on the batch `first`."""
    for at in range(first, first + count, CHUNK):
      chunk = min(CHUNK, first + count - at)
      if (number, chunk) not in self._compiled:
        self._compiled[number, chunk] = jax.jit(functools.partial(_chunk, prog.replica_step), donate_argnums=0)
      cut = lambda x, at=at, chunk=chunk: np.moveaxis(
        x[:, at : at + chunk].reshape(len(SEEDS), chunk, number, 1, ROWS // number, -1), 1, 2
      )
      replicas = self._compiled[number, chunk](replicas, jax.tree.map(cut, batches), values)
    return replicas

  @functools.cache  # noqa: B019 -- one object lives as long as the process
  def _data(self, text: str) -> tuple[Batch, Batch]:
    """The batches of all steps of each seed [seed, step, row, T]; the batches of the held-out text [batch, row, T]."""
    found, stacked = [], lambda batches: Batch(*(np.stack(arrays) for arrays in zip(*batches)))
    for seed in SEEDS:
      config = load([*self.config(Cell(text, 1, 1), seed), "cluster=multiprocess"], check_paths=False)
      with run_data.open_data(config, ROWS, print) as data:
        found.append(stacked([data.train.batch(step) for step in range(STEPS)]))
        (held_out,) = data.evaluations.values()
        (count,) = data.eval_batches(EVAL_BATCHES)
        of_text = stacked([held_out.batch(index) for index in range(count)])
    return stacked(found), of_text

  def _evaluate(self, prog: Any, params: Any, held_out: Batch) -> list[float]:
    if "evaluate" not in self._compiled:
      of_seed = lambda params, batch: prog.eval_step(params, (batch,))
      self._compiled["evaluate"] = jax.jit(jax.vmap(of_seed, in_axes=(0, None)))
    loss, weight = self._compiled["evaluate"](params, jax.tree.map(jnp.asarray, held_out))
    return [float(value) for value in loss / weight]


def _chunk(step: Any, replicas: TrainState, batches: Batch, values: Any) -> TrainState:
  """batches: [seed, replica, step, 1, row, T]."""

  def of_replica(state: TrainState, batches: Batch) -> TrainState:
    return jax.lax.scan(lambda state, batch: (step(state, (batch,), values)[0], None), state, batches)[0]

  return jax.vmap(jax.vmap(of_replica))(replicas, batches)


def _end_round(
  averages: Averages, outer: Any, wire: str, start: TrainState, ends: TrainState, count: Any
) -> TrainState:
  """The state of each seed after the round. On the wire, contributions and their sums have the type `wire`."""
  on_wire = lambda tree: jax.tree.map(lambda x: x.astype(wire).astype(jnp.float32), tree)

  def of_seed(start: TrainState, ends: TrainState) -> TrainState:
    kept, sums, small = averages.kept(start), None, None
    for replica in range(averages.replicas):
      (_, numbers), (large,) = averages.contribution(kept, jax.tree.map(lambda x: x[replica], ends))  # noqa: B023
      large = on_wire(large)
      sums = large if sums is None else jax.tree.map(jnp.add, sums, large)
      small = numbers if small is None else jax.tree.map(jnp.add, small, numbers)
    return averages.outer_step(outer, kept, on_wire(sums), small, count, jnp.int32(0))[0]

  return jax.vmap(of_seed)(start, ends)


def check(trainer: Trainer) -> int:
  """Trains a cell as processes too, and prints the differences. One round: in the next one, training with this learning
  rate amplifies a difference of 1e-7 in the weights to 0.0006 to 0.008 in the loss (measured with the same program)."""
  cell, steps, schedule = Cell("Shakespeare", 2, 20, 0.7, 0.9), 20, f"learning_rate_schedule_steps={STEPS}"
  keys = [f"steps={steps}", f"checkpoint_period={steps}", f"eval_interval={steps}", schedule]
  with tempfile.TemporaryDirectory(prefix="local-steps-") as folder:
    run = ProcessRun(Path(folder), [], slices=cell.replicas)
    places = [f"base_output_directory={run.folder / 'out'}", "enable_report=false", "services="]
    run.keys = [key for key in [*trainer.config(cell, 0), *keys, *places] if not key.startswith("num_slices=")]
    with run.launched() as supervisor:
      code = run.wait(supervisor, 600)
    if code:
      sys.exit(f"The run ended with exit code {code}:\n{run.tail()}")
    theirs = run.arrays(steps)
    (found,) = [record["eval_loss"] for record in run.records("metrics") if "eval_loss" in record]
  state, losses = trainer.train(cell, steps)
  ours = {name: np.asarray(array)[0] for name, array in state_tree.flatten(state).items()}
  print(f"{len(theirs)} arrays, names of only one: {sorted(theirs.keys() ^ ours.keys())}")
  furthest = max(float(np.max(np.abs(ours[name] - array))) for name, array in theirs.items() if name in ours)
  print(f"evaluation loss: here {losses[0]:.6f}, as processes {found:.6f}; furthest values {furthest:.2e} apart")
  return int(abs(losses[0] - found) > 1e-4)


def read(path: Path) -> dict[Cell, list[float]]:
  lines = path.read_text().splitlines() if path.exists() else []
  return {Cell(*record["cell"]): record["losses"] for record in map(json.loads, lines)}


def show(found: dict[Cell, list[float]]) -> None:
  """Prints the mean loss over the seeds, and the mean and standard deviation of its distance from the synchronous run
  of the same seed."""
  for text in TEXTS:
    if (zero := found.get(Cell(text, 1, 30))) is None:
      continue
    print(
      f"\n{text}\n| moments | outer | wire | H | M = 1 | M = 2 | M = 4 | M = 8 |\n|---|---|---|---|---|---|---|---|"
    )
    for row in dict.fromkeys(cell._replace(replicas=0) for cell in cells() if cell.text == text):
      columns = list[str]()
      for losses in (found.get(row._replace(replicas=replicas)) for replicas in REPLICAS):
        each = [one - other for one, other in zip(losses or (), zero)]
        columns.append(f"{mean(losses):.4f} ({mean(each):+.4f}, deviation {stdev(each):.4f})" if losses else "")
      if any(columns):
        kind = f"{row.moments} | {row.rate:g}, {row.momentum:g} | {row.wire} | {row.local_steps}"
        print(f"| {kind} | {' | '.join(columns)} |")


def draw(found: dict[Cell, list[float]], path: str) -> None:
  """Draws by how much more loss than the synchronous run of the same seed Local Adam has."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(7, 3.2), layout="constrained")
  for place, text in enumerate(TEXTS):
    axes = figure.add_subplot(1, 2, place + 1, title=text, xscale="log", xlabel="steps of a round")
    zero = found[Cell(text, 1, 30)]
    for replicas in REPLICAS[1:]:
      counts = [count for count in (1, 10, 30, 100) if Cell(text, replicas, count) in found]
      gaps = [[a - b for a, b in zip(found[Cell(text, replicas, count)], zero)] for count in counts]
      axes.errorbar(counts, [*map(mean, gaps)], [*map(stdev, gaps)], fmt=".-", capsize=2, label=f"{replicas} replicas")
    axes.axhline(0, linestyle=":", color="black", label="synchronous")
  figure.axes[0].set_ylabel("more loss, nats per byte")
  figure.axes[0].legend(frameon=False)
  figure.savefig(path, dpi=120)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--text", type=Path, required=True, help="input.txt of Tiny Shakespeare")
  parser.add_argument("--folder", type=Path, default=Path("runs/local_steps"), help="of the results and of caches")
  parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further run after so many")
  parser.add_argument("--check", action="store_true", help="compare with the product")
  parser.add_argument("--draw", help="write a picture of the losses to this file")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs")
  given = parser.parse_args()
  folder, text, began = given.folder.absolute(), given.text.read_bytes(), time.monotonic()
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "train.txt").write_bytes(text[: int(0.9 * len(text))])
  (folder / "val.txt").write_bytes(text[int(0.9 * len(text)) :])
  jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
  trainer, results = Trainer(folder, given.keys), folder / "losses.jsonl"
  if given.check:
    return check(trainer)
  for cell in cells():
    if cell in read(results) or time.monotonic() - began > given.seconds:
      continue
    start, cpu = time.monotonic(), time.process_time()
    _, losses = trainer.train(cell)
    with results.open("a") as file:
      file.write(json.dumps({"cell": cell, "losses": losses, "cpu": round(time.process_time() - cpu, 1)}) + "\n")
    print(*cell, f"{mean(losses):.4f} after {time.monotonic() - start:.0f} s", flush=True)
  show(read(results))
  if given.draw:
    draw(read(results), given.draw)
  return 0


if __name__ == "__main__":
  sys.exit(main())
