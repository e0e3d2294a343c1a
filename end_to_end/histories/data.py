"""Reads data through random histories of a run whose resumes change all that may change, and follows every example.

A history has 1 to 9 sources (one of them has conversations; two are datasets in Python: a grain.MapDataset of documents
with masks, with elements that are None or cannot be read, and a shuffled MapDataset of examples) with weights that
change, limits of epochs and bad records, slices that are lost and return, hosts that share the rows of each step, and
resumes, also of resumes and at the same step. A resume may change the size of the batch, the weights, the sources (also
one source alone, without a mixture), the packing, the length of an example and the seed.

The examples of each source must be those of the source alone, in its order: none is lost, and none is repeated before
the next epoch of its source. Each share of a mixture has an error below one example since the last change. The cursor
counts the examples that were read. A resume is refused only if allow_config_change does not name what has changed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from end_to_end.histories.__main__ import Play, Played
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.support import chats

from input_pipeline.loader import Loader, make_loader
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config.schema import Config, DataSection
from trainer.elastic import batch_plan
from trainer.run import run_data

BATCH = 25  # histories of a seed: the first ones of hypothesis are simple
ROWS = 3  # of a slice
VOCAB = 1_000_001  # the tokens of source k begin with 100,000 k
DOCUMENTS = (1000, 200, 30, 60, 90, 45, 120, 80, 70, 75)
BAD = (0, 2, 1, 0, 3, 0, 1, 2, 0, 2)  # bad records of each source
NAMES = tuple(f"s{number}" for number in range(len(DOCUMENTS)))
IN_PYTHON = {"s7": "documents", "s8": "examples"}


class Data(NamedTuple):
  """The data of a process."""

  sources: dict[str, dict[str, Any]]  # as in the file of a mixture
  alone: bool  # without a mixture: the first source
  packing: str
  length: int  # of an example, in tokens
  seed: int


class Process(NamedTuple):
  """A process of the run, and the world around it."""

  first: int  # step that it starts with
  slices: int
  alive: int  # slices
  hosts: int  # processes that share the rows
  data: Data


class History(NamedTuple):
  """What happens to a run."""

  steps: int
  processes: list[Process]


def documents() -> grain.MapDataset:
  """Token ids with masks: 80 documents, two of which cannot be read, and None between them."""

  def pair(n: int) -> tuple[list[int], list[int]] | None:
    if n in (11, 50):
      raise OSError("bad")
    ids = [800_000 + 20 * n + place for place in range(1 + n * 7 % 19)]
    return None if n % 9 == 4 else (ids, [place % 2 for place in range(len(ids))])

  return grain.MapDataset.range(DOCUMENTS[7]).map(pair)


def examples() -> grain.MapDataset:
  """70 examples of 1 to 5 tokens, in another order in each epoch."""

  def example(n: int) -> dict[str, np.ndarray]:
    tokens = 900_000 + 20 * n + np.arange(1 + n % 5)
    return {"inputs": tokens, "targets": tokens + 1}

  return grain.MapDataset.range(DOCUMENTS[8]).map(example).shuffle(seed=5)


@st.composite
def mixtures(draw: Any) -> dict[str, dict[str, Any]]:
  names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True))
  names += sorted({draw(st.sampled_from([*IN_PYTHON, names[0]]))} - {*names})
  changes = st.dictionaries(st.integers(1, 20), st.integers(0, 9), max_size=draw(st.sampled_from([0, 2])))
  sources: dict[str, dict[str, Any]] = {name: {"weight": str(draw(st.integers(1, 9)))} for name in names}
  for name in names[1:]:  # the first source always has a weight and no limit
    sources[name]["weight"] += "".join(f", {weight} @ {step}" for step, weight in sorted(draw(changes).items()))
    if draw(st.booleans()):
      sources[name]["epochs"] = draw(st.sampled_from([0.3, 1, 2.5]))
  return sources


# Values of the fields of Data.
VALUES: dict[str, st.SearchStrategy[Any]] = {
  "sources": mixtures(),
  "alone": st.sampled_from([False, False, False, True]),
  "packing": st.sampled_from(["split", "best_fit", "none"]),
  "length": st.sampled_from([8, 5]),
  "seed": st.sampled_from([0, 1]),
}


@st.composite
def histories(draw: Any) -> History:
  steps, slices = draw(st.integers(1, 25)), draw(st.integers(1, 4))
  data = Data(**{key: draw(values) for key, values in VALUES.items()})
  processes: list[Process] = []
  for first in [0, *sorted(draw(st.lists(st.integers(0, steps), max_size=4)))]:
    if processes:
      changed = draw(st.lists(st.sampled_from(Data._fields), max_size=2, unique=True))
      data = data._replace(**{key: draw(VALUES[key]) for key in changed})
      slices = draw(st.integers(1, 4))
    processes.append(Process(first, slices, draw(st.integers(1, slices)), draw(st.integers(1, 3)), data))
  return History(steps, processes)


def write_sources(folder: Path) -> None:
  """Writes the documents of each source, of 1 to 19 tokens. Every token occurs once. Bad lines lie among them."""
  for number, (count, bad) in enumerate(zip(DOCUMENTS, BAD, strict=True)):
    first = 100_000 * (number + 1)
    lines = [json.dumps({"text": [first + 20 * n + place for place in range(1 + n * 7 % 19)]}) for n in range(count)]
    for place in range(bad):
      lines.insert(11 * place + 5, ('{"text": "cut', '{"text": [1, -1]}', '{"other": 1}')[place])
    (folder / f"{NAMES[number]}.jsonl").write_text("\n".join(lines))
  # The last source has conversations of one to three answers: some must be cut at a turn, others are left out.
  said = lambda n, turns: [{"role": role, "content": str(n)} for _ in range(turns) for role in ("user", "assistant")]
  lines = [json.dumps({"text": said(n, 1 + n % 3)}) for n in range(DOCUMENTS[-1])]
  lines[3:3], lines[9:9] = ['{"text": "cut'], ['{"text": [{"role": "tool", "content": "1"}]}']
  (folder / f"{NAMES[-1]}.jsonl").write_text("\n".join(lines))
  chats.write_tokenizer(folder, "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")


def configured(folder: Path, data: Data, allowed: str = "") -> Config:
  """The configuration of a run with these data and allow_config_change=`allowed`."""
  path = folder / "mixture.yml"
  place = lambda name: (
    {"grain_dataset": f"{__name__}:{IN_PYTHON[name]}"}
    if name in IN_PYTHON
    else {"grain_train_files": f"{folder}/{name}.jsonl", "grain_file_type": "jsonl"}
  )
  path.write_text(json.dumps({name: entry | place(name) for name, entry in data.sources.items()}))
  source = place(next(iter(data.sources))) if data.alone else {"grain_train_mixture_config_path": str(path)}
  section = DataSection(
    dataset_type="grain", packing=data.packing, max_target_length=data.length, **source,
    tokenizer_type="bpe", tokenizer_path=str(folder), data_shuffle_seed=data.seed,
    dataset_cache_directory=str(folder / "cache"), max_bad_records=max(BAD),
  )  # fmt: skip
  base = Config()
  run = base.run.model_copy(update={"allow_config_change": allowed})
  model = base.model.model_copy(update={"vocab_size": VOCAB})
  return base.model_copy(update={"data": section, "run": run, "model": model})


@functools.cache
def source_alone(folder: Path, name: str, packing: str, length: int, seed: int) -> Loader:
  """The examples of a source: one in each step."""
  cfg = configured(folder, Data({name: {}}, True, packing, length, seed)).data
  return make_loader(cfg, vocab_size=VOCAB, global_batch_size=1, split="train", log=lambda line: None)


def check_history(folder: Path, history: History) -> None:
  """Raises AssertionError if the history loses, repeats or reorders an example, or ConfigMismatch if it is refused."""
  meta: dict[str, Any] | None = None
  follower = Follower(folder)
  before = history.processes[0]
  ends = [process.first for process in history.processes[1:]] + [history.steps]
  for process, end in zip(history.processes, ends, strict=True):
    batch = ROWS * process.slices
    config = configured(folder, process.data, ",".join(_changes(before, process)))
    run_data.check(config)
    with run_data.open_data(config, batch, lambda line: None) as data:
      if meta is not None:
        data.accept(config, meta)
      data.resume(process.first, meta)
      follower.begin(before, process)
      rows = batch_plan.plan(process.slices, process.alive, 1, ROWS).rows.reshape(-1)
      for step in range(process.first, end):
        found: dict[int, bytes] = {}
        for own in np.array_split(rows, process.hosts):
          found |= _rows(data.train, step, own)
        follower.read(step, [found[row] for row in range(batch)])
      meta = json.loads(json.dumps(data.meta(config, end)))
      follower.check_cursor(meta["cursor"])
    before = process


def _changes(before: Process, now: Process) -> list[str]:
  """What allow_config_change must name."""
  keys = {"packing": "packing", "length": "max_target_length", "seed": "data_shuffle_seed"}
  changed = [key for field, key in keys.items() if getattr(before.data, field) != getattr(now.data, field)]
  if before.data != now.data:
    changed.append("data")
  return changed + ["global_batch_size"] * (before.slices != now.slices)


class Follower:
  """Compares the examples that a run reads with the examples of its sources."""

  def __init__(self, folder: Path) -> None:
    self._folder = folder
    self._counts: dict[tuple[Any, ...], int] = {}  # examples read of a source with a packing, a length and a seed
    self._seen: set[tuple[Any, ...]] = set()
    self._era: tuple[Any, ...] = ()
    self._in_era: Counter[str] = Counter()

  def begin(self, before: Process, process: Process) -> None:
    """The run continues with `process`."""
    self._data = data = process.data
    self._weights = {name: _weights(entry["weight"]) for name, entry in data.sources.items()}
    self._changes = {step for weights in self._weights.values() for step, _ in weights}
    if before.data != data or (before.slices != process.slices and len(self._changes) > 1):
      self._era = ()  # shares are counted from here on
    self._names = [next(iter(data.sources))] if data.alone else [*data.sources]
    for name in self._names:  # data that the run has not read yet, alone, begin where the steps are
      self._counts.setdefault(self._key(name), process.first * ROWS * process.slices if data.alone else 0)

  def read(self, step: int, contents: list[bytes]) -> None:
    """Checks the examples of a step."""
    weights = {name: max(pair for pair in self._weights[name] if pair[0] <= step)[1] for name in self._names}
    since = max(change for change in self._changes if change <= step)
    for content in contents:
      name = NAMES[_first_token(content) // 100_000 - 1]  # the ids of conversations are small: -1, the last source
      key, alone = self._key(name), self._alone(name)
      number = self._counts[key]
      assert content == _rows(alone, number, np.zeros(1, int))[0], f"step {step}: not example {number} of {name}"
      assert alone.num_examples is not None
      identity = key, number // alone.num_examples, content
      assert identity not in self._seen, f"step {step}: example {number} of {name} is repeated in its epoch"
      self._seen.add(identity)
      if not self._data.alone:
        self._check_share(step, name, since, weights)
      self._counts[key] += 1

  def _check_share(self, step: int, name: str, since: int, weights: dict[str, int]) -> None:
    """Counts an example of `name`, and checks the shares since weights changed or a source reached its limit."""
    active = [other for other in self._names if weights[other] and self._counts[self._key(other)] < self._limit(other)]
    assert name in active, f"step {step}: {name} has weight 0, or more examples than its epochs"
    if self._era != (since, active):
      self._era, self._in_era = (since, active), Counter()
    self._in_era[name] += 1
    total, parts = self._in_era.total(), sum(weights[other] for other in active)
    for other in active:
      error = self._in_era[other] - total * Fraction(weights[other], parts)
      assert abs(error) < 1, f"step {step}: the share of {other} has an error of {float(error)} examples"

  def check_cursor(self, cursor: dict[str, Any]) -> None:
    """Checks that the cursor counts the examples that were read."""
    counts = {name: self._counts[self._key(name)] for name in self._names}
    members = cursor["mixture"].get("members", {})
    assert {name: member["count"] for name, member in members.items()} == ({} if self._data.alone else counts)
    assert sorted(cursor["sources"].values()) == sorted(self._counts.values())
    assert cursor["bad_records"] == sum(BAD[NAMES.index(name)] for name in self._names)

  def _key(self, name: str) -> tuple[Any, ...]:
    if IN_PYTHON.get(name) == "examples":  # they are not packed, and have their own order
      return name, "none", self._data.length, 0
    return name, self._data.packing, self._data.length, self._data.seed

  def _alone(self, name: str) -> Loader:
    return source_alone(self._folder, *self._key(name))

  def _limit(self, name: str) -> float:
    size = self._alone(name).num_examples
    assert size is not None
    epochs = self._data.sources[name].get("epochs", math.inf)
    return epochs if math.isinf(epochs) else int(epochs * size)


def _weights(weight: str) -> list[tuple[int, int]]:
  """[(first step, weight from then on)]."""
  first, *changes = weight.split(", ")
  return [(0, int(first)), *((int(step), int(value)) for value, step in (change.split(" @ ") for change in changes))]


def _rows(loader: Loader, step: int, rows: np.ndarray) -> dict[int, bytes]:
  """Row of the global batch -> its content, of the rows that are not padding."""
  batch = loader.batch(step, rows)
  contents = [b"".join(field[place].tobytes() for field in batch) for place in range(len(rows))]
  return {int(row): content for row, content in zip(rows, contents) if row >= 0}


def _first_token(content: bytes) -> int:
  return int(np.frombuffer(content[:4], np.int32)[0])


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str]) -> Iterator[Play]:
  """Yields what plays BATCH histories. One that breaks a rule is made as small as possible."""
  write_sources(folder)

  def play(number: int) -> Played:
    found: list[History] = []
    counts = Counter[str]()

    @seed(number)
    @settings(deadline=None, max_examples=BATCH, phases=[Phase.generate, Phase.shrink], database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(history=histories())
    def run(history: History) -> None:
      found[:] = [history]
      with contextlib.redirect_stdout(io.StringIO()):  # the preparation names the bad records
        check_history(folder, history)
      counts.update(_statistics(history))

    try:
      run()
    except (AssertionError, ConfigMismatch) as error:
      return Played(str(found), [str(error)], counts)
    return Played(str(found), [], counts)

  yield play


def _statistics(history: History) -> dict[str, int]:
  processes = history.processes
  ends = [process.first for process in processes[1:]] + [history.steps]
  pairs = list(itertools.pairwise(processes))
  entries = [entry for process in processes for entry in process.data.sources.values()]
  return {
    "histories": 1,
    "resumes": len(pairs),
    "steps": history.steps,
    "examples": sum((end - one.first) * ROWS * one.slices for one, end in zip(processes, ends)),
    "other batch sizes": sum(one.slices != two.slices for one, two in pairs),
    "other processes": sum(one.hosts != two.hosts for one, two in pairs),
    **{f"changes of {key}": sum(getattr(a.data, key) != getattr(b.data, key) for a, b in pairs) for key in VALUES},
    "sources in Python": sum(name in IN_PYTHON for process in processes for name in process.data.sources),
    "limits of epochs": sum("epochs" in entry for entry in entries),
    "changes of weights at a step": sum(entry["weight"].count("@") for entry in entries),
  }
