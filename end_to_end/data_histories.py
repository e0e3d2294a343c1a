"""Reads mixtures through random histories of processes, and compares the order of examples with an undisturbed reader.

  python -m end_to_end.data_histories [--count 1000]

A history has 1 to 8 sources with weights that change, limits of epochs and bad records, a packing, slices that are lost
and return, hosts that share the rows of each step, and resumes, also of resumes and at the same step. No example may be
lost or repeated: every step has the rows of the undisturbed reader, which is one host with all slices. The counts in
the cursor are the examples that were read. An example of a source returns only in its next epoch. Prints a history that
breaks a rule, made as small as possible, and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainer.config.schema import DataSection
from trainer.data import Loader, check, make_loader
from trainer.elastic import batch_plan

LENGTH, ROWS = 8, 3  # tokens of an example, rows of a slice
VOCAB = 900_001  # the tokens of source k begin with 100,000 k
DOCUMENTS = (1000, 200, 30, 60, 90, 45, 120, 75)
BAD = (0, 2, 1, 0, 3, 0, 1, 2)  # bad records of each source


class Process(NamedTuple):
  """A process of the run, and the world around it."""

  first: int  # step that it starts with
  alive: int  # slices
  hosts: int  # processes that share the rows


class History(NamedTuple):
  """What happens to a run."""

  sources: dict[str, dict[str, Any]]  # as in the file of a mixture
  packing: str
  slices: int
  steps: int
  processes: list[Process]


@st.composite
def histories(draw: Any) -> History:
  names = draw(st.lists(st.sampled_from([f"s{number}" for number in range(8)]), min_size=1, max_size=8, unique=True))
  changes = st.dictionaries(st.integers(1, 20), st.integers(0, 9), max_size=2)
  sources: dict[str, dict[str, Any]] = {name: {"weight": str(draw(st.integers(1, 9)))} for name in names}
  for name in names[1:]:  # the first source always has a weight and no limit
    sources[name]["weight"] += "".join(f", {weight} @ {step}" for step, weight in sorted(draw(changes).items()))
    if draw(st.booleans()):
      sources[name]["epochs"] = draw(st.sampled_from([0.3, 1, 2.5]))
  slices, steps = draw(st.integers(1, 4)), draw(st.integers(1, 25))
  starts = [0, *sorted(draw(st.lists(st.integers(0, steps), max_size=4)))]
  processes = [Process(start, draw(st.integers(1, slices)), draw(st.integers(1, 3))) for start in starts]
  return History(sources, draw(st.sampled_from(["split", "best_fit", "none"])), slices, steps, processes)


def write_sources(folder: Path) -> None:
  """Writes the documents of each source, of 1 to 19 tokens. Every token occurs once. Bad lines lie among them."""
  for number, (documents, bad) in enumerate(zip(DOCUMENTS, BAD, strict=True)):
    first = 100_000 * (number + 1)
    lines = [
      json.dumps({"text": [first + 20 * n + place for place in range(1 + n * 7 % 19)]}) for n in range(documents)
    ]
    for place in range(bad):
      lines.insert(11 * place + 5, ('{"text": "cut', '{"text": [1, -1]}', '{"other": 1}')[place])
    (folder / f"s{number}.jsonl").write_text("\n".join(lines))


def load(folder: Path, sources: dict[str, dict[str, Any]], batch: int, packing: str) -> Loader:
  path = folder / "mixture.yml"
  path.write_text(json.dumps({name: entry | {"path": f"{folder}/{name}.jsonl"} for name, entry in sources.items()}))
  cfg = DataSection(
    dataset_type="grain", grain_file_type="jsonl", grain_train_mixture_config_path=str(path), packing=packing,
    max_target_length=LENGTH, dataset_cache_directory=str(folder / "cache"), max_bad_records=max(BAD),
  )  # fmt: skip
  check(cfg, VOCAB)
  return make_loader(cfg, vocab_size=VOCAB, global_batch_size=batch, split="train", log=lambda line: None)


def check_history(folder: Path, history: History) -> None:
  """Raises AssertionError if the history loses, repeats or reorders an example."""
  batch = ROWS * history.slices
  start = functools.partial(load, folder, history.sources, batch, history.packing)
  whole = start()
  undisturbed = [_rows(whole, step, np.arange(batch)) for step in range(history.steps)]
  cursor = whole.cursor(0)
  ends = [process.first for process in history.processes[1:]] + [history.steps]
  for process, end in zip(history.processes, ends, strict=True):
    loader = start()
    if process is not history.processes[0]:
      loader.resume(process.first, cursor["next_example"], cursor["mixture"], same=True)
      assert loader.next_examples(process.first) == whole.next_examples(process.first)
    rows = batch_plan.plan(history.slices, process.alive, 1, ROWS).rows.reshape(-1)
    for step in range(process.first, end):
      found: dict[int, bytes] = {}
      for own in np.array_split(rows, process.hosts):
        found |= _rows(loader, step, own)
      assert found == undisturbed[step], f"step {step}"
    cursor = json.loads(json.dumps(loader.cursor(end)))
    loader.close()
  whole.close()
  assert cursor["bad_records"] == sum(BAD[int(name[1:])] for name in history.sources)
  _check_counts(folder, history, undisturbed, cursor)


def _check_counts(folder: Path, history: History, undisturbed: list[dict[int, bytes]], cursor: dict[str, Any]) -> None:
  """The examples of each source are those that its cursor counts, and return only in another epoch."""
  contents = Counter(content for rows in undisturbed for content in rows.values())
  for name in history.sources:
    first = 100_000 * (int(name[1:]) + 1)
    own = {content: count for content, count in contents.items() if 0 <= _first_token(content) - first < 100_000}
    total = cursor["mixture"]["members"][name]["count"]
    assert sum(own.values()) == total, name
    if own:
      alone = load(folder, {name: {"weight": 1}}, ROWS, history.packing)
      examples = alone._source._members[0].source.num_examples  # type: ignore[attr-defined]
      alone.close()
      assert max(own.values()) <= math.ceil(total / examples), name
      assert total < examples or len(own) == examples, name
  assert sum(contents.values()) == history.steps * ROWS * history.slices


def _rows(loader: Loader, step: int, rows: np.ndarray) -> dict[int, bytes]:
  """Row of the global batch -> its content, of the rows that are not padding."""
  batch = loader.batch(step, rows)
  contents = [b"".join(field[place].tobytes() for field in batch) for place in range(len(rows))]
  return {int(row): content for row, content in zip(rows, contents) if row >= 0}


def _first_token(content: bytes) -> int:
  return int(np.frombuffer(content[:4], np.int32)[0])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=1000)
  count = parser.parse_args().count
  seen = Counter[str]()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_sources(folder)

    @settings(deadline=None, max_examples=count, phases=[Phase.generate, Phase.shrink], derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(history=histories())
    def run(history: History) -> None:
      with contextlib.redirect_stdout(io.StringIO()):  # the preparation names the bad records
        check_history(folder, history)
      seen.update({
        "histories": 1,
        "sources": len(history.sources),
        "resumes": len(history.processes) - 1,
        "steps": history.steps,
        "examples": history.steps * ROWS * history.slices,
        "sources with bad records": sum(BAD[int(source[1:])] > 0 for source in history.sources),
        "limits of epochs": sum("epochs" in entry for entry in history.sources.values()),
        "changes of weights": sum(entry["weight"].count("@") for entry in history.sources.values()),
      })  # fmt: skip

    began, cpu = time.monotonic(), time.process_time()
    run()
  print(", ".join(f"{value:,} {kind}" for kind, value in seen.items()))
  print(
    f"0 lost, 0 repeated, 0 reordered; {time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} CPU seconds"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
