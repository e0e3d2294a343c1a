"""Ways to forge a receipt, each with new hashes: `verify` finds it, its replay finds it, or docs/trust.md names it."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.command import ROOT, cpu_environment
from tests.support.seeds import few

import trainer
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config.errors import ConfigError
from trainer.tools import verify
from trainer.trust import receipt, replay
from trainer.trust.receipt_lines import FILE, sealed


class Forgery:
  """A copy of a run. `lines` are those of its receipt, and `steps` those about steps, without hashes."""

  def __init__(self, folder: Path, other: Path):
    self.folder, self.other = folder, other  # other: the same run from step 8 on with another learning rate
    self.lines = fields(folder)
    self.head, self.steps = self.lines[0], {line["step"]: line for line in self.lines if "step" in line}

  def record(self, step: int, **values: float) -> None:
    """Changes numbers in metrics.jsonl and in the receipt alike."""
    path = self.folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = next(record for record in records if record["step"] == step)
    found |= values
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    self.steps[step] |= {name: struct.pack(">f", value).hex() for name, value in values.items()}

  def foreign(self) -> None:
    """The last checkpoint is another one, with its state in the receipt."""
    shutil.rmtree(self.folder / "checkpoints" / "12")
    shutil.copytree(self.other / "checkpoints" / "12", self.folder / "checkpoints" / "12")
    self.steps[12]["state"] = next(line["state"] for line in fields(self.other) if line.get("step") == 12)

  def seal(self) -> None:
    text, prev = "", ""
    for line in self.lines:
      new, prev = sealed(line, prev)
      text += f"{new}\n"
    (self.folder / FILE).write_text(text)

  def without(self, *names: str) -> None:
    for line in self.steps.values():
      for name in names:
        line.pop(name, None)

  def from_metrics(self, *steps: int) -> None:
    for step in steps:
      line = self.steps[step]
      for name in ("computed", "state", "witness"):
        line.pop(name, None)
      line["from"] = "metrics.jsonl"

  def cut(self, step: int) -> None:
    """No lines after `step`, here and in metrics.jsonl."""
    self.lines[:] = [line for line in self.lines if line.get("step", 0) <= step]
    records = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (self.folder / "metrics.jsonl").write_text("".join(one for one in records if json.loads(one)["step"] <= step))


def fields(folder: Path) -> list[dict]:
  lines = [json.loads(line) for line in receipt.read(str(folder))]
  return [{name: value for name, value in line.items() if name not in ("hash", "prev")} for line in lines]


def drop(forgery: Forgery, *numbers: int) -> None:
  forgery.lines[:] = [line for number, line in enumerate(forgery.lines) if number not in numbers]


def late(f: Forgery) -> None:
  f.lines[:] = [f.head | {"after": 5}, *f.lines[6:]]


def other_run(f: Forgery) -> None:
  f.lines.insert(7, f.head | {"after": 6, "run_id": "0" * 12})


def alone(f: Forgery, step: int = 11) -> None:
  """The step was computed by one slice: no bits are promised from here on."""
  f.steps[step]["computed"] = {"0": [[0, 4]]}
  f.steps[step].pop("witness", None)


def early_stop(f: Forgery) -> None:
  f.cut(8)
  shutil.rmtree(f.folder / "checkpoints" / "12")


FOUND = {
  "another loss": lambda f: f.steps[5].update(loss="40000000"),
  "another norm": lambda f: f.steps[5].update(grad_norm="40000000"),
  "another number of tokens": lambda f: f.steps[5].update(tokens="40000000"),
  "no metrics.jsonl": lambda f: (f.folder / "metrics.jsonl").unlink(),
  "a step less in the middle": lambda f: drop(f, 6),
  "the last steps are missing": lambda f: drop(f, 9, 10, 11, 12),
  "no first line": lambda f: drop(f, 0),
  "deleted in the middle of the run": late,
  "a step twice": lambda f: f.lines.insert(5, f.lines[5]),
  "two steps in another order": lambda f: f.lines.insert(4, f.lines.pop(5)),
  "another run goes on": other_run,
  "no states": lambda f: f.without("state"),
  "no state of one step": lambda f: f.steps[6].pop("state"),
  "an empty state": lambda f: f.steps[6].update(state={}),
  "another state of a checkpoint": lambda f: f.steps[8]["state"].update({"params.lm_head": "0" * 16}),
  "an array less in the state of a checkpoint": lambda f: f.steps[8]["state"].pop("params.lm_head"),
  "a row that nobody computed": lambda f: f.steps[5]["computed"].update({"1": [[3, 4]]}),
  "a row that two computed": lambda f: f.steps[5]["computed"].update({"1": [[1, 4]]}),
  "more rows than the batch has": lambda f: f.steps[5]["computed"].update({"1": [[2, 5]]}),
  "more slices than the run has": lambda f: f.steps[5].update(computed={"0": [[0, 2]], "1": [[2, 3]], "2": [[3, 4]]}),
  "no slices": lambda f: f.without("computed"),
  "no witness": lambda f: f.without("witness"),
  "a witness alone": lambda f: f.steps[6]["witness"].update(members=[0]),
  "a witness twice": lambda f: f.steps[6]["witness"].update(members=[0, 0]),
  "a witness that computes nothing": lambda f: f.steps[6]["witness"].update(members=[0, 7]),
  "a witness of another share": lambda f: f.steps[6]["witness"].update(share=1 - f.steps[6]["witness"]["share"]),
  "a witness that was not due": lambda f: f.steps[5].update(witness={"share": 0, "members": [0, 1]}),
  "another witness_period": lambda f: f.head["config"].update(witness_period=5),
  "no examples": lambda f: f.steps[5].update(examples=""),
  "checksums that only slices as processes have": lambda f: f.steps[5].update(weights="0" * 8),
  "one step from metrics.jsonl": lambda f: f.from_metrics(5),
  "all steps from metrics.jsonl": lambda f: f.from_metrics(*f.steps),
  "from metrics.jsonl, with a state": lambda f: f.steps[1].update({"from": "metrics.jsonl"}),
  "a field that does not exist": lambda f: f.steps[5].update(verified=True),
  "a loss that is no float32": lambda f: f.steps[5].update(loss="4"),
  "a loss that is a number": lambda f: f.steps[5].update(loss=4.5),
  "no devices": lambda f: f.head.pop("devices"),
  "other words for what was computed": lambda f: f.head.update(computes="all"),
  "a negative number of slices": lambda f: f.head["devices"].update(slices=-1),
  "as many slices as a machine cannot start": lambda f: f.head["devices"].update(slices=10**9),
  "a configuration without steps": lambda f: f.head["config"].pop("steps"),
  "a configuration of words": lambda f: f.head.update(config="as usual"),
  "a foreign last checkpoint": lambda f: (f.foreign(), f.steps[12].update(state=f.steps[10]["state"])),
  "a checkpoint after the last step": lambda f: f.cut(8),
}
# Found by `--replay 9:12`.
BY_REPLAY = {
  "another loss in both files": lambda f: f.record(10, loss=2.0),
  "another norm in both files": lambda f: f.record(10, grad_norm=2.0),
  "other examples": lambda f: f.steps[10].update(examples="0" * 32),
  "another state between checkpoints": lambda f: f.steps[10]["state"].update({"params.lm_head": "0" * 16}),
  "a foreign checkpoint with its state": Forgery.foreign,
  "the same, after a step of one slice": lambda f: (f.foreign(), alone(f)),
  "the same, with other versions": lambda f: (f.foreign(), f.head["versions"].update(jax="0.1")),
  "the same, with another device": lambda f: (f.foreign(), f.head["devices"].update(kind="abacus")),
  "another learning rate": lambda f: f.head["config"].update(learning_rate=0.011),
  "another seed of the data": lambda f: (
    f.head["config"].update(data_shuffle_seed=1, witness_period=0) or f.without("witness")
  ),
  "another loss by a step of one slice": lambda f: (f.record(12, loss=2.0), alone(f)),
}
# docs/trust.md says so.
NOT_FOUND = {
  "the rest of the run was removed everywhere": early_stop,
  "the slices have other numbers": lambda f: f.steps[10].update(computed={"0": [[2, 4]], "1": [[0, 2]]}),
  "a witness that never computed": lambda f: (
    (f.head["config"].update(witness_period=12), f.without("witness"))
    and f.steps[12].update(witness={"share": 0, "members": [0, 1]})
  ),
  "another host": lambda f: f.head.update(host="elsewhere"),
  "another commit": lambda f: f.head["code"].update(git_commit="0" * 40),
  "a rounding error after a step of one slice": lambda f: (f.record(12, loss=near(f, 12)), alone(f)),
  "fewer states": lambda f: (f.head["config"].update(receipt_state_period=50), f.steps[6].pop("state")),
}
ALL = {"found": FOUND, "by replay": BY_REPLAY, "not found": NOT_FOUND}


def near(f: Forgery, step: int) -> float:
  return struct.unpack(">f", bytes.fromhex(f.steps[step]["loss"]))[0] * (1 + 1e-6)


@pytest.fixture(scope="module")
def runs(trained, config, once):
  """(the folder of a run, of the same run that went on from step 8 with another learning rate)."""

  def train(folder):
    shutil.copytree(trained, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "12")
    assert trainer.Run(config(folder, "run_name=run", "learning_rate=0.1")).train()

  return trained, once("other", train) / "run"


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
  """{what was asked: the folder of its result}."""
  return {}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch, replays, tmp_path_factory):
  """Replays run here, and each once."""

  def run(command, log):
    folder = next(Path(word.partition("=")[2]) for word in command if word.startswith("base_output_directory="))
    asked = (Path(command[3]).read_text(), *(word for word in command[4:] if not word.startswith("base_output")))
    if asked not in replays:
      try:
        assert command[2] == "trainer" and trainer.Run(trainer.load(*command[3:])).train()
      except ConfigMismatch as error:  # the process would end with 2
        raise ConfigError(str(error)) from error
      replays[asked] = tmp_path_factory.mktemp("replayed") / "replay"
      shutil.copytree(folder / "replay", replays[asked])
    shutil.copytree(replays[asked], folder / "replay", dirs_exist_ok=True)

  monkeypatch.setattr(replay, "_run", run)


def ended(capsys, *arguments) -> tuple[int, str]:
  code = verify.main(list(map(str, arguments)))
  printed = capsys.readouterr()
  return code, printed.out + printed.err


WAYS = [(kind, name) for kind, some in ALL.items() for name in some]


@pytest.mark.parametrize(("kind", "name"), few(WAYS[::3], WAYS))
def test_a_forgery(runs, tmp_path, capsys, kind, name):
  forgery = Forgery(shutil.copytree(runs[0], tmp_path / "run", symlinks=True), runs[1])
  ALL[kind][name](forgery)
  forgery.seal()
  code, printed = ended(capsys, tmp_path / "run")
  assert code == (kind == "found"), printed
  if kind != "found":
    last = max(forgery.lines[-1].get("step", 0), 8)
    code, printed = ended(capsys, tmp_path / "run", "--replay", f"{9 if last > 8 else 5}:{last}")
    assert bool(code) == (kind == "by replay"), printed


def test_an_honest_run_is_accepted(runs, capsys):
  for keys in ((), ("--replay", "9:12", "num_slices=1")):
    code, printed = ended(capsys, runs[0], *keys)
    assert code == 0, printed
    print(printed)
  assert "state of step 12" in printed.lower() and "differs most" in printed
  assert ended(capsys, runs[1])[0] == 0


ODD = (None, 10**30, "x\n", [{}])


def test_odd_heads_with_new_hashes_are_answered(runs, tmp_path, capsys):
  """They gave tracebacks."""
  folder = shutil.copytree(runs[0], tmp_path / "run", symlinks=True)
  names = [*fields(folder)[0], *(f"config.{name}" for name in ("steps", "num_slices", "dataset_type", "learning_rate"))]
  names += ["config.learning_rate_schedule_steps", "devices.slices", "versions.jax", "data.global_batch_size"]
  for name in names:
    outer, _, inner = name.partition(".")
    for value in ODD:
      forgery = Forgery(folder, runs[1])
      if inner:
        forgery.head[outer][inner] = value
      else:
        forgery.head[outer] = value
      forgery.seal()
      code, printed = ended(capsys, folder, "--replay", "9:9")
      assert code in (0, 1, 2), printed
    shutil.copyfile(runs[0] / FILE, folder / FILE)


@pytest.mark.parametrize("key", ["learning_rate=3", "run_name=x"])
def test_a_key_that_changes_the_numbers_accuses_nobody(runs, capsys, key):
  code, printed = ended(capsys, runs[0], "--replay", "9:12", key)
  assert code == 2 and f"{key.partition('=')[0]}=...: this key belongs to what is computed" in printed, printed


def test_sigterm_ends_a_replay_and_leaves_nothing(runs, tmp_path):
  command = [sys.executable, "-m", "trainer.tools.verify", str(runs[0]), "--replay", "9:12"]
  environment = cpu_environment({"TMPDIR": str(tmp_path)})
  with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
    while not next(process.stdout).startswith("Computing"):
      pass
    time.sleep(1.0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
  assert children and not [one for one in children if Path(f"/proc/{one}").exists()]
  assert not list(tmp_path.glob("replay-*"))
