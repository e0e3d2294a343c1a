"""trainer.tools.accept: what it computes without the trainer, what a card tells, and which input it refuses."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests.support.command import ROOT, cpu_environment

from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from trainer.tools.accept import accept_corpus, launchers
from trainer.tools.accept import card as card_lib
from trainer.tools.accept.__main__ import main
from trainer.tools.accept.rows import LOSSES, Acceptance, CardRow

LENGTH = 32


def test_the_digests_of_batches_are_those_of_the_loader_and_each_document_is_in_an_epoch_once(tmp_path):
  file = accept_corpus.write(str(tmp_path), LENGTH)
  options = DataOptions(
    max_target_length=LENGTH,
    dataset_type="grain",
    grain_file_type="jsonl",
    grain_train_files=file,
    packing="none",
    dataset_cache_directory=str(tmp_path / "cache"),
  )
  loader = make_loader(options, vocab_size=258, global_batch_size=12, split="train")
  numbers = []
  for step in range(accept_corpus.DOCUMENTS // 12):
    of_step = [accept_corpus.number_of(tokens) for tokens in loader.batch(step).tokens]
    assert accept_corpus.digest(of_step, LENGTH) == loader.tally(step, hashes=True).hex
    assert accept_corpus.digest(of_step[::-1], LENGTH) != loader.tally(step, hashes=True).hex
    numbers += of_step
  loader.close()
  assert sorted(numbers) == list(range(accept_corpus.DOCUMENTS))


@pytest.fixture
def card(tmp_path):
  """The card of a run on a host and with an address that only its records and its command have."""
  launcher = launchers.Launcher("agents", 3, ["run", "--listen", "node-1:77"], private=("node-1:77",))
  found = Acceptance(launcher, tmp_path, [], 1.0, "accept")
  found.rows = [
    CardRow(
      3, "a slice is killed", "goes on", f"/home/me/{socket.gethostname()} 10.1.2.3:77 gs://b/x node-2", "c", True
    )
  ]
  found.losses = [_bits(5.0 - step / LOSSES) for step in range(LOSSES)]
  found.start = {"platform": "cpu", "device_kind": "cpu", "devices": 3, "devices_per_slice": 1}
  (tmp_path / "kill").mkdir()
  (tmp_path / "kill/events.jsonl").write_text('{"kind": "run_start", "host": "node-2", "wall": 1.0}\n')
  found.rows[0].holds = True
  found.rows[0].command = f"python {tmp_path}/kill --user={getpass.getuser()}"
  return card_lib.made(found, 1.0)


def test_the_folder_may_have_spaces(tmp_path):
  (out := tmp_path / "a b").mkdir()
  command = Acceptance(launchers.Launcher("command", 2, ["run"]), out, [], 1.0, "accept").jobs["kill"].command()
  assert {f"grain_train_files={out}/documents.jsonl", f"dataset_cache_directory={out}/cache"} < set(command)


def test_rows_of_a_lost_slice_do_not_apply_where_accept_cannot_kill_a_slice(tmp_path, monkeypatch):
  found = Acceptance(launchers.Launcher("command", 2, ["run"]), tmp_path, [], 1.0, "accept")
  (tmp_path / "kill").mkdir()
  start, ready = '{"kind": "run_start", "devices": 2, "device_kind": "cpu"}', '{"kind": "init_done", "seconds": 1}'
  (tmp_path / "kill/events.jsonl").write_text(f"{start}\n{ready}\n")
  (tmp_path / "kill.txt").touch()
  for name in ("_train", "_stop_with_42", "_complete"):
    monkeypatch.setattr(found, name, lambda *_: None)
  found._kill()
  rows = {row.name: row for row in found.rows}
  assert rows["devices"].holds
  assert rows["a slice is killed"].holds is None and "--kill COMMAND" in rows["a slice is killed"].seen
  assert rows["it returns"].holds is None


def _bits(loss):
  return struct.pack(">f", loss).hex()


def test_a_card_has_no_names_of_hosts_people_addresses_or_folders(card, tmp_path):
  row = card.rows[0]
  assert row.seen == "PLACE PLACE PLACE HOST" and row.command == "python OUT/kill --user=USER"
  assert card.command.startswith("run --listen ... configs/accept.yml")
  text = card.text() + card_lib.page(card)
  for name in (str(tmp_path), socket.gethostname(), "10.1.2.3", "gs://", "node-"):
    assert name not in text


def test_two_cards_are_compared(card, tmp_path, capsys):
  other = card.model_copy(deep=True)
  assert card_lib.compared(card, other).holds
  other.losses[41] = _bits(4.59001)
  wrong = card_lib.compared(card, other)
  assert wrong.holds is False and "first at step 42" in wrong.seen
  other.machine["cpu"] = "another"
  assert card_lib.compared(card, other).holds  # within the tolerance
  for loss in (9.0, math.nan, 0.0):
    other.losses[41] = _bits(loss)
    assert card_lib.compared(card, other).holds is False
    assert card_lib.compared(other, card).holds is False
  assert card_lib.compared(card.model_copy(update={"keys": ["dtype=bfloat16"]}), other).holds is None
  other.rows[0].holds = False
  names = [tmp_path / name for name in ("a.yml", "b.yml")]
  for name, one in zip(names, (card, other), strict=True):
    name.write_text(one.text())
  assert main(["--check", *map(str, names)]) == 1
  printed = capsys.readouterr().out
  assert "row 3, a slice is killed: holds and does not hold" in printed and "cpu: " in printed
  assert main(["--check", str(names[0]), str(names[0])]) == 0


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--slices", "1", "new"], "--slices 1: a lost slice needs another one"),
    (["--launcher", "slurm", "--listen", "a:1", "new"], "TRAINER_TOKEN: agents need it"),
    (["--launcher", "command", "new"], "belongs to --launcher command"),
    (["--listen", "a:1", "new"], "only agents and slurm need it"),
    (["new", "steps=4"], "steps=4: accept sets this key"),
    (["new", "--only", "kill,all"], "--only all: is no part"),
    (["gs://bucket/new"], "accept damages checkpoints"),
    (["--budget", "0", "new"], "--budget 0: must be more"),
    ([__file__], "is there already"),
    (["--check", "missing.yml", "missing.yml"], "missing.yml: is no card"),
  ],
)
def test_wrong_input_is_2_and_nothing_is_made(arguments, said, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TRAINER_TOKEN", raising=False)
  assert main(arguments) == 2
  assert said in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_a_card_is_read_again_or_refused(card, tmp_path, capsys):
  file, good = tmp_path / "card.yml", yaml.safe_load(card.text())
  file.write_text(card.text())
  assert card_lib.read(str(file)) == card
  changes = [{"format": 9}, {"rows": [{"row": 1}]}, {"rows": 3}, {"losses": ["zz"]}, {"losses": None}, {"machine": []}]
  texts = [yaml.safe_dump({**good, **change}) for change in changes]
  for text in (
    *texts,
    card.text().partition("losses:")[0],
    "",
    "[1, 2]",
    "a: b: c",
    "name: another program",
    "\0",
    "!!python/name:os.x",
  ):
    file.write_text(text)
    assert main(["--check", str(file), str(file)]) == 2, text
    assert f"{file}: is no card" in capsys.readouterr().err
  file.write_bytes(b"\xff\xfe")
  assert main(["--check", str(file), str(file)]) == 2
  file.write_text(yaml.safe_dump({**good, "rows": [], "losses": []}))  # nothing was shown
  assert main(["--check", str(file), str(file)]) == 1


@pytest.fixture
def accept(tmp_path):
  """Starts accept on a trainer that only waits, with a child that has left its session."""
  seconds = f"600.{os.getpid()}"
  trainer = f"sh -c 'setsid sleep {seconds} & exec sleep {seconds}'"
  main = "import signal; signal.signal(2, signal.default_int_handler)  # a shell's job in the background ignores it\n"
  main += "from trainer.tools.accept.__main__ import main; raise SystemExit(main())"
  command = [sys.executable, "-c", main, "--launcher", "command", "--command", trainer]
  started = []

  def start(*options):
    with (tmp_path / "log").open("w") as log:
      words = [*command, *options, tmp_path / "out"]
      started.append(subprocess.Popen(words, stdout=log, stderr=log, env=cpu_environment({}), cwd=ROOT))
    return started[0]

  yield start, lambda: sum(seconds in text for text in _commands() if "accept" not in text)
  for process in started:
    process.kill()
    process.wait()


def _commands():
  for file in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      yield file.read_bytes().decode(errors="replace")


def test_a_run_that_hangs_has_its_share_of_the_time_and_hides_no_row(accept, tmp_path):
  start, count = accept
  assert start("--budget", "0.05", "--only", "storage,kill,crash").wait(60) == 1
  rows = {row.name: row for row in card_lib.read(str(tmp_path / "out/card.yml")).rows}
  assert rows["storage"].holds and rows["devices"].holds is rows["all are killed"].holds is False
  assert "its share of the time is over" in rows["devices"].seen
  assert "its share of the time is over" in rows["all are killed"].seen
  assert "--only crash OUT" in rows["all are killed"].command
  assert count() == 0


def test_ctrl_c_leaves_nothing(accept, tmp_path):
  start, count = accept
  process = start("--only", "stop")
  deadline = time.monotonic() + 60
  while count() < 2:
    assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130
  assert count() == 0 and not (tmp_path / "out").exists()
