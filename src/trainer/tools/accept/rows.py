"""The rows of a card: what accept does to the runs, and what it must see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from trainer import cluster
from trainer.observe.metrics import read_losses
from trainer.process import child
from trainer.tools.accept import accept_corpus
from trainer.tools.accept.launchers import DoesNotApply, Job, Launcher, Line, NotSeen, kill_all

LOSSES = 100  # steps of row 7
PARTS = {  # {part: (its share of the time, the part whose run it needs)}
  "storage": (1, ""),
  "kill": (24, ""),
  "stop": (13, ""),
  "crash": (13, ""),
  "damage": (18, ""),
  "undisturbed": (11, ""),
  "batches": (2, "kill"),
  "equal": (5, "undisturbed"),
  "replay": (8, "kill"),
  "speed": (5, "undisturbed"),
}
LATE = "its share of the time is over. Give a larger --budget, if nothing hangs"
_MORE = 1.5  # times its share a part may take: most parts need less
_BATCH, _LENGTH = 12, 128  # B and T of the runs
_CLOCK_SECONDS = 2.0
_CALM = 5  # steps in a row that show that a run goes on
_OTHER_SUMS = 1e-3  # of losses where fewer slices add in another order (one controller)
_PREDICTED = re.compile(r"^(Checkpoint: [^,]+|Step time on [^;]+|.*at least .* per step)", re.MULTILINE)


@dataclass
class CardRow:
  """holds: None where the row does not apply here; `seen` says why. command: repeats what the row shows. figures: what
  `seen` says, if it is empty."""

  row: int
  name: str
  expected: str
  seen: str = ""
  command: str = ""
  holds: bool | None = False
  figures: dict[str, float] = field(default_factory=dict)

  @property
  def state(self) -> str:
    return {True: "holds", False: "does not hold", None: "does not apply"}[self.holds]


class Acceptance:
  """Plays the runs and fills the rows. out: the folder of the runs, which all hosts reach. again: the command of accept
  without its last arguments."""

  def __init__(self, launcher: Launcher, out: Path, keys: Sequence[str], minutes: float, again: str) -> None:
    self.launcher, self.out, self.keys = launcher, out, list(keys)
    self.rows: list[CardRow] = []
    self.losses: list[str] = []
    self.start: dict[str, Any] = {}  # the record of the first start of a run
    self._again, self._part = again, ""
    self._deadline = self._end_of_part = time.monotonic() + 60 * minutes
    self._last: dict[str, int] = {}  # {complete run: its last step}
    self._delays: dict[str, float] = {}  # {process that writes records: seconds until accept has read the last one}
    arguments = [
      "configs/accept.yml",
      f"base_output_directory={out}",
      f"grain_train_files={accept_corpus.write(str(out), _LENGTH)}",
      f"dataset_cache_directory={out}/cache",
      f"per_device_batch_size={_BATCH / launcher.slices:g}",
      f"jax_cache_dir={out}/compiled",
      *keys,
    ]
    names = ("kill", "stop", "crash", "damage", "undisturbed")
    self._started: list[subprocess.Popen[bytes]] = []
    self.jobs = {
      name: Job(launcher, name, [*arguments, f"run_name={name}"], out, self._started, self._seconds_left)
      for name in names
    }

  def play(self, wanted: Sequence[str]) -> None:
    """Fills the rows of these parts, and of the parts that they need. At its end no process of a run is left."""
    parts = [part for part in PARTS if part in {*wanted, *(PARTS[one][1] for one in wanted)}]
    child.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
      for at, self._part in enumerate(parts):
        share = min(1.0, _MORE * PARTS[self._part][0] / sum(PARTS[part][0] for part in parts[at:]))
        self._end_of_part = time.monotonic() + share * (self._deadline - time.monotonic())
        getattr(self, f"_{self._part}")()
        kill_all(self._started)
    finally:
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a second one would leave processes
      kill_all(self._started)

  def _seconds_left(self) -> float:
    if (left := self._end_of_part - time.monotonic()) <= 0:
      raise NotSeen(LATE)
    return left

  @contextlib.contextmanager
  def _row(self, number: int, name: str, expected: str) -> Iterator[CardRow]:
    """A row whose block says what was seen. A block that raises does not hold, and hides no other row."""
    row = CardRow(number, name, expected, command=self.command(self._part))
    try:
      yield row
      row.holds = True
    except NotSeen as seen:
      row.holds, row.seen = seen.holds, str(seen)
    except Exception as error:  # noqa: BLE001 - a broken trainer may write anything
      row.seen = f"{type(error).__name__}: {error}"
    row.seen = row.seen or ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in row.figures.items())
    self.rows.append(row)
    print(f"{row.row} {row.name}: {row.state}. {row.seen}", flush=True)

  def command(self, parts: str) -> str:
    """The command that plays only these parts again."""
    return " ".join([self._again, "--only", parts, "OUT", *self.keys])

  # ---- 1: the storage of OUT

  def _storage(self) -> None:
    with self._row(1, "storage", "one lock at a time; a rename replaces; the bytes that were written are read") as row:
      lock, other, data = self.out / "lock", self.out / "other", os.urandom(64 << 20)
      with lock.open("w") as one, lock.open("w") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with contextlib.suppress(BlockingIOError):
          fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
          raise NotSeen("two files lock the same file at once: two runs in one folder are not kept apart")
      begun = time.monotonic()
      with other.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
      speed, skew = 64 / (time.monotonic() - begun), abs(other.stat().st_mtime - time.time())
      other.replace(lock)
      _expect(not other.exists() and lock.read_bytes() == data, "a file that was renamed has other bytes")
      lock.unlink()
      _expect(skew < _CLOCK_SECONDS + 64 / speed, f"the clock of the storage differs by {skew:.0f} s")
      opened, free = resource.getrlimit(resource.RLIMIT_NOFILE)[1], shutil.disk_usage(self.out).free / 1e9
      _expect(opened == resource.RLIM_INFINITY or opened >= 1024, f"at most {opened} open files (ulimit -Hn)")
      row.figures = {"write_MB_per_second": round(speed), "free_GB": round(free), "open_files": opened}

  # ---- 3: lost slices, and ends; each with a run of its own

  def _train(self, job: Job, steps: int, *keys: str) -> None:
    """Starts the run and returns when it has done `steps` further steps on all slices."""
    begun = len(job.steps())
    job.start(*keys)
    job.wait("the first step", lambda: len(job.steps()) > begun)
    self._calm(job, self.launcher.slices, steps)

  def _calm(self, job: Job, slices: int, steps: int = _CALM) -> Line:
    """Waits for so many further steps in a row on so many slices. Returns the first one on them."""
    begun, wanted = len(job.steps()), [slices] * steps
    said = f"{steps} steps on {slices} slices"
    job.wait(said, lambda: [step["slices"] for step in job.steps()[begun:][-steps:]] == wanted)
    done = job.steps()[begun:]
    self._delays[done[-1]["process"]] = time.time() - float(done[-1]["wall"])
    return next(step for step in done if step["slices"] == slices)

  def _stop_with_42(self, job: Job) -> float:
    """Sends SIGTERM, and returns the seconds until the run has saved and ended."""
    begun = time.monotonic()
    self._started[0].terminate()
    code = job.end()
    _expect(code == 42, f"exit code {code} after SIGTERM, not 42: {job.tail()}")
    return time.monotonic() - begun

  def _complete(self, job: Job, more: int) -> None:
    """Starts the run again, until it has `more` further steps."""
    last = max((int(step["step"]) for step in job.steps()), default=0) + more
    job.start(f"steps={last}")
    code = job.end()
    _expect(code == 0, f"exit code {code} at the end of the run: {job.tail()}")
    self._last[job.name] = last

  def _kill(self) -> None:
    job, launcher, after = self.jobs["kill"], self.launcher, None
    n, is_rehearsed = launcher.slices, not launcher.has_worlds and not launcher.kill
    faults = ["fault_injection=slice_down@25:0:prepared, slice_up@45:0", "snapshot_period=1"] if is_rehearsed else []
    with self._row(1, "devices", f"{n} slices start and train") as row:
      self._train(job, 22, *faults)
      self.start, ready = dict(job.events("run_start")[-1]), float(job.events("init_done")[-1]["seconds"])
      row.seen = f"{self.start['devices']} devices of kind {self.start['device_kind']}, ready after {ready:.0f} s"
    allowed, who = int(not launcher.has_worlds), "a new group goes" if launcher.restarts_all else "the others go"
    with self._row(3, "a slice is killed", f"{who} on; steps lost: at most {allowed}") as row:
      killed = self._kill_slice(job, is_rehearsed)
      after = self._calm(job, n - (not launcher.restarts_all))
      row.figures = {"seconds": round(float(after["wall"]) - killed, 3), "steps_lost": (lost := _repeated(job))}
      _expect(lost <= allowed, f"{lost} steps lost")
    with self._row(3, "it returns", f"{n} slices again, until the run completes: exit codes 42, 0") as row:
      if after is not None:
        row.figures = {"seconds": round(float(self._calm(job, n)["wall"]) - float(after["wall"]), 1)}
      self._stop_with_42(job)
      self._complete(job, 5)
      if after is None:
        raise DoesNotApply("no slice was lost; the run has completed")
    with self._row(1, "clocks", f"those who write records agree within {_CLOCK_SECONDS:g} s") as row:
      _expect(bool(self._delays), "no run has steps")
      worst = max(self._delays.values(), key=abs)
      row.figures = {"processes": len(self._delays), "largest_difference_seconds": round(worst, 2)}
      _expect(abs(worst) < _CLOCK_SECONDS, f"they differ by {worst:.2f} s")
    with self._row(1, "network", "figures of the connections between slices on several hosts") as row:
      if not launcher.has_worlds:
        raise DoesNotApply("one controller: the connections belong to its runtime")
      _expect(bool(records := job.events("network")), "the run has no record of its connections")
      if not (links := records[-1]["links"]):
        raise DoesNotApply("all slices are on one host")
      delay, speed = max(link[0] for link in links.values()), min(link[1] for link in links.values())
      row.figures = {"connections": len(links), "round_trip_ms": round(1e3 * delay, 4)}
      row.figures["GB_per_second"] = float(f"{1e-9 * speed:.3g}")

  def _kill_slice(self, job: Job, is_rehearsed: bool) -> float:
    """Kills the slice that writes the records, and returns the time."""
    if is_rehearsed:
      job.wait("a lost slice", lambda: job.events("fault_injected"))
      return float(job.events("fault_injected")[-1]["wall"])
    command, killed = self.launcher.kill, time.time()
    if not command:
      if (pid := job.victim()) is None:
        raise DoesNotApply("the slices are not processes of this command. Give --kill COMMAND, which kills one")
      command = f"kill -9 {pid}"
    subprocess.run(command, shell=True, check=True, timeout=job.seconds_left())
    return killed

  def _stop(self) -> None:
    job = self.jobs["stop"]
    with self._row(3, "SIGTERM", "exit code 42 after a save; then the next step follows") as row:
      self._train(job, accept_corpus.DOCUMENTS // _BATCH + 5)  # into the second epoch
      seconds = self._stop_with_42(job)
      self._complete(job, 10)
      row.figures = {"seconds": round(seconds, 1), "steps_lost": (lost := _repeated(job))}
      _expect(lost == 0, f"{lost} steps lost")

  def _crash(self) -> None:
    job = self.jobs["crash"]
    with self._row(3, "all are killed", "the same command goes on from the newest checkpoint") as row:
      if self.launcher.name in ("agents", "slurm"):
        raise DoesNotApply("members on other hosts save the state when the supervisor dies")
      self._train(job, 12)
      job.wait("a checkpoint", lambda: job.events("checkpoint_saved"))
      self._calm(job, self.launcher.slices, 3)
      kill_all(self._started)
      killed, done = time.time(), len(job.steps())  # a step may have been recorded until now
      saved = int(job.events("checkpoint_saved")[-1]["step"])
      self._complete(job, 10)
      first = next(step for step in job.steps()[done:] if float(step["wall"]) > killed)
      _expect(int(first["step"]) > saved, f"began again with step {first['step']}, though step {saved} was saved")
      row.figures = {"seconds": round(float(first["wall"]) - killed, 1), "steps_lost": _repeated(job)}

  # ---- 4: the storage taken away, and damaged

  def _damage(self) -> None:
    job = self.jobs["damage"]
    checkpoints = Path(job.directory) / "checkpoints"
    with self._row(4, "storage away", "steps go on; saves succeed when it is back") as row:
      self._train(job, 3)
      job.wait("a checkpoint", lambda: job.events("checkpoint_saved"))
      checkpoints.rename(checkpoints.with_name("away"))
      checkpoints.write_text("no folder")
      try:
        job.wait("a save that fails", lambda: job.events("checkpoint_failed"))
        self._calm(job, self.launcher.slices)
      finally:
        checkpoints.unlink()
        checkpoints.with_name("away").rename(checkpoints)
      saved = len(job.events("checkpoint_saved"))
      job.wait("the next save", lambda: len(job.events("checkpoint_saved")) > saved)
      row.seen = f"saves failed: {len(job.events('checkpoint_failed'))}; then one succeeded"
    with self._row(4, "a damaged checkpoint", "one wrong bit: refused; an older one is used") as row:
      self._stop_with_42(job)
      newest = max(checkpoints.glob("[0-9]*"), key=lambda folder: int(folder.name))
      victim = max(newest.rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
      data = bytearray(victim.read_bytes())
      data[len(data) // 2] ^= 1
      victim.write_bytes(data)
      self._complete(job, 10)
      refused = [event["step"] for event in job.events("checkpoint_rejected")]
      _expect(int(newest.name) in refused, f"the damaged checkpoint {newest.name} was not refused")
      row.seen = f"checkpoint {newest.name} refused, {_repeated(job)} steps done again"

  # ---- the run without faults, and what is compared with it

  def _undisturbed(self) -> None:
    job, steps = self.jobs["undisturbed"], max([LOSSES, *self._last.values()])
    with self._row(7, "a run without faults", f"{steps} steps, exit code 0") as row:
      self._complete(job, steps)
      self.start = self.start or dict(job.events("run_start")[-1])
      losses = read_losses(job.directory)
      self.losses = [struct.pack(">f", losses[step]).hex() for step in range(1, LOSSES + 1)]
      row.seen = f"loss {losses[1]:.4f} at step 1, {losses[LOSSES]:.4f} at step {LOSSES}"

  def _equal(self) -> None:
    for name in [name for name in self._last if name != "undisturbed"]:
      ours, theirs = f"{self.out}/{name}", f"{self.out}/undisturbed"
      is_exact = self.launcher.has_worlds or name != "kill"
      expected = "the bits of" if is_exact else f"losses within {_OTHER_SUMS:g} (other order of sums) of"
      with self._row(3, f"bits of {name}", f"{expected} the run without faults") as row:
        self._tool(row, "verify", ours)
        if is_exact:
          row.seen = self._tool(row, "verify", ours, "--against", theirs)[-1]
        else:
          one, other = read_losses(ours), read_losses(theirs)
          gap = max(abs(one[step] / other[step] - 1) for step in one)
          row.seen = f"the losses differ by at most {gap:.1e}"
          _expect(gap <= _OTHER_SUMS, row.seen)

  # ---- 2: the receipt of the run with a lost slice, against the documents

  def _batches(self) -> None:
    n = self.launcher.slices
    expected = f"each part computed once, each document once in an epoch, on {n}, {n - 1}, {n} slices"
    with self._row(2, "batches", expected) as row:
      lines = _receipt(self.jobs["kill"])
      batch = int(self.jobs["kill"].events("run_start")[-1]["global_batch_size"])
      numbers = _documents(self.jobs["kill"].directory, len(lines), batch)
      for at in range(0, len(numbers), accept_corpus.DOCUMENTS):
        epoch = numbers[at : at + accept_corpus.DOCUMENTS]
        _expect(len(set(epoch)) == len(epoch), f"a document is twice in epoch {at // accept_corpus.DOCUMENTS}")
      self._tool(row, "verify", self.jobs["kill"].directory)  # among others, that each part is computed once
      row.command, counts = self.command("batches"), list[int]()
      for step in range(1, len(lines) + 1):
        wanted = accept_corpus.digest(numbers[(step - 1) * batch : step * batch], _LENGTH)
        seen = lines[step]["examples"]
        _expect(seen == wanted, f"step {step}: the run has read other examples: digest {seen}, expected {wanted}")
        alive = len(lines[step]["computed"])
        counts += [alive] if counts[-1:] != [alive] else []
      if counts == [n] and not self.launcher.restarts_all:
        raise DoesNotApply(f"no slice was lost; {len(lines)} steps on {n} slices are as expected")
      _expect(counts[-1] == n and (n - 1 in counts or self.launcher.restarts_all), f"slices that computed: {counts}")
      row.seen = f"{len(lines)} steps, {len(numbers)} examples; slices that computed: {', '.join(map(str, counts))}"

  # ---- 5 and 6

  def _replay(self) -> None:
    directory, n = self.jobs["kill"].directory, self.launcher.slices
    where = ["num_slices=1", *([] if self.launcher.has_worlds else ["cluster=simulated"])]
    with self._row(5, "replay", "three steps computed again by another slice") as row:
      lines = _receipt(self.jobs["kill"])
      first = min(int(folder.name) for folder in Path(directory, "checkpoints").glob("[0-9]*")) + 1
      first = min((step for step, line in lines.items() if step > first and len(line["computed"]) < n), default=first)
      done, who = f"{first}:{first + 2}", ", ".join(lines[first]["computed"])
      row.seen = self._tool(row, "verify", directory, "--replay", done, *where)[-1]
      row.seen = f"steps {done}, computed by slices {who}: {row.seen}"

  def _speed(self) -> None:
    job, figures = self.jobs["undisturbed"], {}
    with self._row(6, "speed", "figures to compare; nothing is required") as row:
      steps = job.steps()[LOSSES // 2 :]
      _expect(bool(steps), f"the run {job.name} has fewer than {LOSSES // 2} steps")
      seconds = statistics.median(float(step["seconds"]) for step in steps)
      start = job.events("run_start")[-1]
      figures = {"step_seconds": seconds, "tokens_per_second": start["tokens_per_step"] / seconds}
      if computing := [max(step["slice_seconds"].values()) for step in steps if step.get("slice_seconds")]:
        exchange = max(1e-6, seconds - statistics.median(computing))
        figures |= {"exchange_share": exchange / seconds}
        figures |= {"exchange_GB_per_second": 4e-9 * start["parameters"] / exchange}
      if utilisation := [float(step["mfu"]) for step in steps if step.get("mfu")]:
        figures["mfu"] = statistics.median(utilisation)
      if snapshots := [event["bytes"] / event["seconds"] for event in job.events("snapshot")]:
        figures["snapshot_GB_per_second"] = 1e-9 * statistics.median(snapshots)
      saved = job.events("checkpoint_saved")[-1]
      size = sum(file.stat().st_size for file in Path(saved["path"]).rglob("*") if file.is_file())
      figures |= {"checkpoint_MB": 1e-6 * size, "save_GB_per_second": 1e-9 * size / float(saved["seconds"])}
      row.figures = {name: float(f"{value:.4g}") for name, value in figures.items()}
    kind = [
      f"cluster={'multiprocess' if self.launcher.has_worlds else 'simulated'}",
      f"num_slices={self.launcher.slices}",
    ]
    with self._row(6, "preflight", "what is predicted without a run; nothing is required") as row:
      found = _PREDICTED.findall("\n".join(self._tool(row, "preflight", *job.arguments, *kind)))
      _expect(bool(found), "preflight predicts nothing")
      timed = "" if len(found) > 1 else ", no time for devices of this kind"
      row.seen = f"predicted: {'; '.join(found)}{timed}. Seen: "
      row.seen += f"{1e3 * figures.get('step_seconds', 0):.3g} ms, {figures.get('checkpoint_MB', 0):.3g} MB"

  def _tool(self, row: CardRow, tool: str, *arguments: str) -> list[str]:
    """The lines that a tool of the trainer prints. Raises NotSeen unless it ends with 0."""
    variables = {**cluster.inherited_environment(), "TMPDIR": str(self.out)}
    row.command = " ".join(command := [sys.executable, "-m", f"trainer.tools.{tool}", *arguments])
    null, left = subprocess.DEVNULL, self._seconds_left()
    try:
      done = subprocess.run(command, capture_output=True, text=True, stdin=null, timeout=left, env=variables)
    except subprocess.TimeoutExpired:
      raise NotSeen(f"{tool}: {LATE}") from None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    _expect(done.returncode == 0, f"{tool} ends with {done.returncode}: {' / '.join(lines[-3:])}")
    return lines


def _expect(holds: bool, otherwise: str) -> None:
  if not holds:
    raise NotSeen(otherwise)


def _repeated(job: Job) -> int:
  """Completed steps that the run has done again."""
  return len(job.steps()) - len({step["step"] for step in job.steps()})


def _receipt(job: Job) -> dict[int, Line]:
  lines = {line["step"]: line for line in job.read("receipt.jsonl") if "step" in line}
  _expect(bool(lines), f"the run {job.name} has no receipt")
  return lines


def _documents(directory: str, steps: int, batch: int) -> list[int]:
  """The numbers of the documents of these steps, in the order of the run's own data."""
  config = yaml.safe_load(Path(directory, "config.yml").read_text())
  options = DataOptions(**{name: config[name] for name in DataOptions.model_fields if name in config})
  loader = make_loader(options, vocab_size=int(config["vocab_size"]), global_batch_size=batch, split="train")
  with contextlib.closing(loader):
    return [accept_corpus.number_of(tokens) for step in range(steps) for tokens in loader.batch(step).tokens]
