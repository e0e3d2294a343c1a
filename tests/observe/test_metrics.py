from __future__ import annotations

import numpy as np
import pytest

from stepcost import chips
from trainer.observe import events, metrics


def record(step: int, **changes) -> metrics.StepRecord:
  fields = {"step": step, "seconds": 0.159, "loss": 9.774, "grad_norm": 1.234, "lr": 3e-4, "tokens": 73728, "slices": 3}
  return metrics.StepRecord(**(fields | changes))


def open_metrics(path) -> metrics.Metrics:
  return metrics.Metrics(str(path), events.EventLog(str(path), "r"))


def test_the_step_line_word_for_word():
  line = metrics.format_step_line(record(8, tflops_per_device=43.43, eta=65.0))
  assert line == (
    "completed step: 8, seconds: 0.159, TFLOP/s/device: 43.430, loss: 9.774, grad_norm: 1.234, slices: 3, eta: 0:01:05"
  )
  assert metrics.format_duration(3 * 86400) == "72:00:00"


def test_numbers_are_read_back_bit_for_bit(tmp_path):
  rng = np.random.default_rng(0)
  losses = rng.normal(size=50)
  out = open_metrics(tmp_path)
  for step, loss in enumerate(losses):
    out.write(record(step, loss=loss, grad_norm=np.float32(loss)))
  out.close()
  history = metrics.read_metrics(str(tmp_path))
  assert [r["loss"] for r in history] == losses.tolist()
  assert [r["grad_norm"] for r in history] == losses.astype(np.float32).tolist()
  assert history[3].keys() >= {"attempt", "wall", "monotonic", "process", "weights", "data_wait", "slices", "seconds"}


def test_lines_that_another_program_has_changed_end_no_run(tmp_path):
  """A line without a step ended the next start of the run with a KeyError."""
  out = open_metrics(tmp_path)
  out.write(record(1, loss=2.0))
  out.close()
  odd = ["5", "{}", '{"step": "x", "loss": 1.0}', '{"step": [1], "loss": 1.0}', '{"step": 1, "eval_losses": 3}']
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write("\n".join([*odd, '{"step": 2, "loss": "x", "lr": [1]}', ""]))
  assert metrics.eval_loss(str(tmp_path), 1, ["a"], "a") is None
  again = open_metrics(tmp_path)
  assert again.recorded_step() == 0
  again.write(record(2, loss=1.5))
  assert again.recorded_step() == 2
  again.close()
  assert [r.get("loss") for r in metrics.read_metrics(str(tmp_path))] == [2.0, 1.5]
  (tmp_path / "events.jsonl").write_text('{}\n5\n{"kind": 5}\n{"kind": "fault_injected"}\n')
  assert events.read_events(str(tmp_path)) == [{"kind": "fault_injected"}]


def test_the_history_is_the_last_time_each_step_was_done(tmp_path):
  out = open_metrics(tmp_path)
  for step, loss in [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]:
    out.write(record(step, loss=loss))
  out.write_eval(metrics.Evaluation(3, 2.5))
  for step, loss in [(1, 4.5), (2, 3.5)]:  # a rewind to step 1, not yet back at step 3
    out.write(record(step, loss=loss))
  out.write_eval(metrics.Evaluation(2, 3.25))
  out.close()
  history = metrics.read_metrics(str(tmp_path))
  assert [(r["step"], r["loss"], r.get("eval_loss")) for r in history] == [
    (0, 5.0, None),
    (1, 4.5, None),
    (2, 3.5, 3.25),
  ]
  assert [r["step"] for r in metrics.read_records(str(tmp_path))] == [0, 1, 2, 3, 3, 1, 2, 2]


@pytest.mark.parametrize("reached", [4, 6])  # by the processes that were restarted from the checkpoint of step 2
def test_a_new_primary_ignores_records_that_an_earlier_restart_gave_up(tmp_path, reached):
  first = open_metrics(tmp_path)
  for step in range(1, 7):
    first.write(record(step))
  first.write_eval(metrics.Evaluation(6, 2.0))
  first.close()  # killed
  second, third = open_metrics(tmp_path), open_metrics(tmp_path)
  third.hand_over()
  for step in range(3, 8):
    if step <= reached:
      second.write(record(step))
    third.write(record(step))
    if step == 6:
      third.write_eval(metrics.Evaluation(6, 1.0))
  second.close()  # killed: it had not written the rest
  assert third.recorded_step() == reached
  assert [missing.step for missing in third.take_over()] == list(range(reached + 1, 8))
  third.close()
  history = metrics.read_metrics(str(tmp_path))
  assert [one["step"] for one in history] == list(range(1, 8))
  assert [one.get("eval_loss") for one in history] == [None] * 5 + [1.0, None]


@pytest.mark.parametrize(
  ("kind", "name", "tflops"),
  [
    ("TPU v4", "v4", 275),
    ("TPU v5 lite", "v5e", 197),
    ("TPU v5", "v5p", 459),
    ("TPU v6 lite", "v6e", 918),
    ("TPU7x", "7x", 1153.5),
    ("NVIDIA A100-SXM4-80GB", "A100", 312),
    ("NVIDIA A100-SXM4-40GB", "A100-40GB", 312),
    ("NVIDIA H100 80GB HBM3", "H100", 989.4),
    ("NVIDIA H100 PCIe", "H100-PCIe", 756),
    ("NVIDIA H100 NVL", "H100-NVL", 835),
    ("NVIDIA H200", "H200", 989.4),
    ("NVIDIA B200", "B200", 2250),
    ("v5e", "v5e", 197),
  ],
)
def test_chips_are_found_by_their_device_kind(kind, name, tflops):
  chip = chips.find(kind)
  assert chip.name == name and chip.peak_flops == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
  ("kind", "dtype", "tera"),
  [("v5e", "s8", 393), ("7x", "f8e5m2", 2307), ("NVIDIA H100 NVL", "s8", 1671), ("NVIDIA H200", "f8e4m3fn", 1979)],
)
def test_peaks_of_8_bit_matmuls(kind, dtype, tera):
  assert chips.find(kind).peak(dtype) == pytest.approx(tera * 1e12)


ONE = {"eval"}, "eval"  # the only set


def test_an_evaluation_counts_for_the_last_time_that_its_step_was_done(tmp_path):
  """Also for the next process. A step that is done again has not been evaluated, whatever the records before say."""
  out = open_metrics(tmp_path)
  for step in (1, 10, 2):
    out.write(record(step))
  assert metrics.eval_loss(str(tmp_path), 10, *ONE) is None
  out.write_eval(metrics.Evaluation(10, 2.5))
  out.write(record(11))
  assert open_metrics(tmp_path).eval_loss(10, {"eval", "web"}, "eval") is None
  out.write_eval(metrics.Evaluation(11, 3.0, eval_losses={"eval": 3.0, "web": 4.0}))
  for sets, main, loss in (({"eval", "web"}, "eval", 3.0), ({"web"}, "web", 4.0), ({"eval", "new"}, "eval", None)):
    assert open_metrics(tmp_path).eval_loss(11, sets, main) == loss
  assert out.eval_loss(10, *ONE) == open_metrics(tmp_path).eval_loss(10, *ONE) == 2.5
  assert all(open_metrics(tmp_path).eval_loss(step, *ONE) is None for step in (0, 1, 2, 12, 100))
  out.write(record(10))
  out.close()
  with (tmp_path / metrics.METRICS_FILE).open("a") as file:
    file.write('{"step": 10, "eval_lo')  # cut short by a kill
  assert open_metrics(tmp_path).eval_loss(10, *ONE) is None
