"""Synthetic runs for the tests of reports: the real writers, with a clock that the test moves."""

from __future__ import annotations

import math
import random

from trainer.observe import events, log, metrics


class FakeRun:
  """One process of a run."""

  def __init__(
    self, path, *, wall: float = 1.8e9, slices: int = 3, steps: int = 60, quiet: bool = True, listener=None, **start
  ):
    self.path, self.now, self.steps = str(path), 100.0, steps
    self.alive = set(range(slices))
    self.down = 0
    self.wall = wall - self.now
    self.log = log.get(self.path)
    if quiet:
      self.log.redirect(lambda text: None)
    self.events = events.EventLog(
      self.path, self.path.split("/")[-1], wall=lambda: self.wall + self.now, monotonic=lambda: self.now
    )
    if listener is not None:
      self.events.subscribe(listener)
    self.metrics = metrics.Metrics(self.path, self.events)
    self.total = slices
    facts = {"steps": steps, "num_slices": slices, "devices": 2 * slices, "device_kind": "cpu", "vocab_size": 320}
    facts |= {"tokens_per_step": 6144, "unigram_entropy": 4.51, "parameters": 3_212_000, "config": {"steps": steps}}
    self.events.emit("run_start", **(facts | start))
    self.after(3.0, "compile", seconds=2.5, what="train_step", compilations=1)
    self.after(0.2, "init_done", seconds=3.2)
    self.events.emit("attempt_start", attempt=1, step=0, slices=sorted(self.alive))

  @property
  def slices(self) -> int:
    return len(self.alive)

  def after(self, pause: float, kind: str, /, **fields) -> None:
    self.now += pause
    self.events.emit(kind, **fields)

  def loss(self, step: int) -> float:
    noise = random.Random(step).gauss(0, 0.05)
    return 1.9 + (math.log(320) - 1.9) * math.exp(-step / (0.18 * self.steps)) + noise * (step > 1)

  def step(self, step: int, *, error: float = 0.0, **fields: float) -> None:
    seconds = 0.35 * self.total / self.slices
    self.now += seconds
    record = metrics.StepRecord(
      step=step,
      seconds=seconds,
      loss=self.loss(step) * (1 + error),
      grad_norm=1.5 * math.exp(-step / self.steps) + 0.2 * random.Random(-step).random(),
      lr=1e-3 * min(1, step / (0.1 * self.steps)) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps)),
      tokens=6144 * step,
      slices=self.slices,
      tokens_per_second_per_device=6144 / seconds / (2 * self.slices),
      eta=(self.steps - step) * seconds,
      data_wait=0.002,
      **fields,
    )
    self.metrics.write(record)
    self.log.line(metrics.format_elastic_line(step, self.down, self.slices))
    self.log.line(metrics.format_step_line(record))
    if step % 20 == 0:
      self.after(0.01, "checkpoint_saved", step=step, tier="persistent", blocking_seconds=0.01, seconds=0.01)
      self.metrics.write_eval(metrics.Evaluation(step, self.loss(step) + 0.1))

  def lose(self, slice_id: int, step: int, *, resume: int, outage: float = 0.0) -> None:
    """Loses a slice after `step`; training continues on the other slices from step `resume`."""
    self.down += 1
    self.alive.remove(slice_id)
    self.after(0.2, "slice_down", slice=[slice_id], step=step, slices=sorted(self.alive), detect_seconds=0.2)
    self.now += outage
    self.after(0.1, "restore", tier="snapshot", step=resume - 1, seconds=0.1)
    self._recovered("slice_down", slice_id, step, resume, tier="snapshot")

  def gain(self, slice_id: int, step: int) -> None:
    self.alive.add(slice_id)
    self.after(0.05, "slice_up", slice=[slice_id], step=step, slices=sorted(self.alive))
    self.after(0.1, "restore", tier="snapshot", step=step, seconds=0.1)
    self._recovered("slice_up", slice_id, step, step + 1, tier="snapshot")

  def _recovered(self, event: str, slice_id: int, step: int, resume: int, tier: str) -> None:
    lost = step + 1 - resume
    fields = {"event": event, "slice": [slice_id], "step_before": step, "step_after": resume - 1, "tier": tier}
    fields |= {"steps_lost": lost, "tokens_lost": lost * 6144, "slices_after": self.slices, "detect_seconds": 0.2}
    fields |= {"wait_seconds": 0.0, "restore_seconds": 0.1, "compile_seconds": 0.0, "first_step_seconds": 0.4}
    self.events.emit("recovery", **(fields | {"seconds": 0.7, "compilations": 0}))

  def end(self, code: int = 0, step: int | None = None) -> None:
    self.events.emit("sample", step=step, prompt="def main(", text="self):\n  return <b>None</b>  # \u00e9")
    self.after(0.5, "run_end", exit=code)
    self.close()

  def close(self) -> None:
    self.metrics.close()
    self.events.close()
    self.log.close()


def elastic_run(path, *, steps: int = 60, error: float = 0.0, **start) -> FakeRun:
  """A run on 3 slices, then 2 from step 12 (which is repeated), then 3 from step 31 to the end."""
  run = FakeRun(path, steps=steps, **start)
  for step in range(1, 13):
    run.step(step)
  run.lose(1, 12, resume=12)
  for step in range(12, 31):
    run.step(step, error=error)
  run.gain(1, 30)
  for step in range(31, steps + 1):
    run.step(step)
  run.end(step=steps)
  return run


def plain_run(path, *, steps: int = 60, **start) -> FakeRun:
  run = FakeRun(path, steps=steps, **start)
  for step in range(1, steps + 1):
    run.step(step)
  run.end(step=steps)
  return run
