"""trainer.tools.accept: what it computes without the trainer, what a card tells, and which input it refuses."""

from __future__ import annotations

import copy
import getpass
import socket
import struct
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import yaml

from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from trainer.tools.accept import card as card_lib
from trainer.tools.accept import corpus, launchers
from trainer.tools.accept.__main__ import main
from trainer.tools.accept.rows import LOSSES, CardRow

LENGTH = 32


def test_the_digests_of_batches_are_those_of_the_loader_and_each_document_is_in_an_epoch_once(tmp_path):
  file = corpus.write(str(tmp_path), LENGTH)
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
  for step in range(corpus.DOCUMENTS // 12):
    of_step = [corpus.number_of(tokens) for tokens in loader.batch(step).tokens]
    assert corpus.digest(of_step, LENGTH) == loader.tally(step, hashes=True).hex
    assert corpus.digest(of_step[::-1], LENGTH) != loader.tally(step, hashes=True).hex
    numbers += of_step
  loader.close()
  assert sorted(numbers) == list(range(corpus.DOCUMENTS))


@pytest.fixture
def card(tmp_path):
  rows = [
    CardRow(3, "kill -9 of a slice", "goes on", f"/home/me/{socket.gethostname()} 10.1.2.3:77 gs://b/x", "c", True)
  ]
  found = SimpleNamespace(
    launcher=launchers.Launcher("local", 3, ["run"]),
    out=tmp_path,
    keys=[],
    rows=rows,
    losses=[struct.pack(">f", 5.0 - step / LOSSES).hex() for step in range(LOSSES)],
    machine={"platform": "cpu", "device_kind": "cpu", "devices": 3, "devices_per_slice": 1},
  )
  rows[0].command = f"python {tmp_path}/kill --user={getpass.getuser()}"
  return card_lib.made(found, 1.0)


def test_a_card_has_no_names_of_hosts_people_addresses_or_folders(card, tmp_path):
  row = card["rows"][0]
  assert row["seen"] == "PLACE PLACE PLACE" and row["command"] == "python OUT/kill --user=USER"
  text = yaml.safe_dump(card) + card_lib.page(card)
  for name in (str(tmp_path), socket.gethostname(), "10.1.2.3", "gs://"):
    assert name not in text


def test_two_cards_are_compared(card, tmp_path, capsys):
  other = copy.deepcopy(card)
  assert card_lib.compared(card, other).holds
  other["losses"][41] = struct.pack(">f", 4.59001).hex()
  wrong = card_lib.compared(card, other)
  assert wrong.holds is False and "first at step 42" in wrong.seen
  other["machine"]["cpu"] = "another"
  assert card_lib.compared(card, other).holds  # within the tolerance
  other["losses"][41] = struct.pack(">f", 9.0).hex()
  assert card_lib.compared(card, other).holds is False
  assert card_lib.compared({**card, "keys": ["dtype=bfloat16"]}, other).holds is None
  other["rows"][0]["holds"] = False
  names = [tmp_path / name for name in ("a.yml", "b.yml")]
  for name, one in zip(names, (card, other), strict=True):
    name.write_text(yaml.safe_dump(one))
  assert main(["--check", *map(str, names)]) == 1
  printed = capsys.readouterr().out
  assert "row 3, kill -9 of a slice: holds and does not hold" in printed and "cpu: " in printed
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
    (["gs://bucket/new"], "is no new local folder"),
    (["--check", "missing.yml", "missing.yml"], "missing.yml: cannot be read"),
  ],
)
def test_wrong_input_is_2_and_nothing_is_made(arguments, said, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TRAINER_TOKEN", raising=False)
  assert main(arguments) == 2
  assert said in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_a_card_is_read_again_or_refused(card, tmp_path, capsys):
  file = tmp_path / "card.yml"
  for change in ({"format": 9}, {"rows": [{"row": 1}]}, {"losses": ["zz"]}):
    file.write_text(yaml.safe_dump({**card, **change}))
    assert main(["--check", str(file), str(file)]) == 2
    assert str(file) in capsys.readouterr().err
  file.write_text(yaml.safe_dump(card))
  assert asdict(CardRow(**card_lib.read(str(file))["rows"][0])) == card["rows"][0]
