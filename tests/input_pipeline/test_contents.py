"""The identity of a corpus: what is noticed when its files change, and what it costs to know it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.data_files import ARROW
from tests.support.seeds import few

from input_pipeline import contents, corpus, packages, remote
from input_pipeline.documents import Documents, Piece, uncut
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions

WORDS = [f"word{number:05} " * 40 + "\n" for number in range(1500)]  # 660 KB
FORMATS = ["text", "text in parts", "jsonl", "jsonl.gz", "arrayrecord_text", "arrayrecord_uint16", "parquet", "hf"]


def write(folder: Path, form: str, words: list[str]) -> dict[str, str]:
  """Files with the words, old enough that their stamps are trusted. Returns the keys that name them."""
  folder.mkdir(exist_ok=True)
  keys = {"dataset_type": "grain", "grain_file_type": form.partition(".")[0], "grain_train_files": str(folder)}
  match form:
    case "text" | "text in parts":
      (folder / "a.txt").write_text("".join(words))
      keys = {"dataset_type": "text", "dataset_path": str(folder), "eval_fraction": "0.1"}
    case "jsonl" | "jsonl.gz":
      import gzip

      lines = "".join(json.dumps({"text": text}) + "\n" for text in words).encode()
      plain = form == "jsonl"
      (folder / f"a.{form}").write_bytes(lines if plain else gzip.compress(lines, 0, mtime=0))
    case "parquet" | "hf":
      pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
      table = pyarrow.table({"text": words})
      if form == "parquet":
        parquet.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False)
      else:
        with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
          out.write_table(table, 100)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
        keys = {"dataset_type": "hf", "dataset_path": str(folder)}
    case _:
      writer = packages.array_record().ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1,uncompressed")
      for text in words:
        is_text = form == "arrayrecord_text"
        writer.write(text.encode() if is_text else np.frombuffer(text.encode(), np.uint8).astype("<u2").tobytes())
      writer.close()
  return keys


def settle(folder: Path) -> None:
  """As if the files had been written long ago."""
  time.sleep(max(0, max(file.stat().st_ctime for file in folder.rglob("*")) + 2.1 - time.time()))


def opened(tmp_path: Path, keys: dict[str, str], **more) -> tuple[Loader, list[str]]:
  """The loader, and the lines of its log."""
  given = {"max_target_length": 64, "dataset_cache_directory": str(tmp_path / "cache"), "packing": "best_fit"}
  lines: list[str] = []
  cfg = DataOptions(**given | keys | more)
  return make_loader(cfg, vocab_size=300, global_batch_size=4, split="train", log=lines.append), lines


def tokens(loader: Loader) -> str:
  content = hashlib.sha256()
  for number in range(loader.num_examples // 4):
    content.update(loader.batch(number).tokens)
  return content.hexdigest()


@pytest.mark.parametrize("form", few(["text", "parquet", "arrayrecord_uint16"], FORMATS))
def test_a_change_in_place_is_noticed_and_a_copy_is_not(tmp_path, form, monkeypatch):
  if form in ("parquet", "hf") and not ARROW:
    pytest.skip("needs the extra arrow")
  if form == "text in parts":
    monkeypatch.setattr(corpus, "_WHOLE", 1000)
  keys = write(tmp_path / "a", form, WORDS)
  settle(tmp_path / "a")
  first, lines = opened(tmp_path, keys)
  assert any(line.startswith(("Tokenizing", "Packing")) for line in lines)
  again, lines = opened(tmp_path, keys)
  assert not lines and again.fingerprint() == first.fingerprint()
  # Touched, and copied to another place: read again, and neither tokenised again nor another corpus.
  for file in (tmp_path / "a").iterdir():
    os.utime(file)
  assert opened(tmp_path, keys)[1] == []
  copied, lines = opened(tmp_path, write(tmp_path / "b", form, WORDS))
  assert lines == [] and copied.fingerprint() == first.fingerprint()
  # One word in the middle, with the size and the times of before.
  (file,) = [file for file in (tmp_path / "a").iterdir() if file.name.startswith("a.")]
  status = file.stat()
  write(tmp_path / "a", form, [*WORDS[:700], WORDS[700].replace("word", "wood", 1), *WORDS[701:]])
  os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
  assert form == "jsonl.gz" or file.stat().st_size == status.st_size
  changed, lines = opened(tmp_path, keys)
  assert any(line.startswith(("Tokenizing", "Packing")) for line in lines)
  assert changed.fingerprint() != first.fingerprint() and tokens(changed) != tokens(first)


def test_the_version_of_an_object_is_its_stamp(tmp_path):
  def stamps(version: str) -> contents.Stamps:
    file = remote.RemoteFile("gs://b/a.txt", 9, version)
    return contents.Stamps([Documents("text", [Piece("a.txt", file, 0, 9)], lambda piece: iter(()), "text", uncut)])

  first, other, unknown = stamps("1"), stamps("2"), stamps("")
  for one in (first, unknown):  # without a version nobody can know whether the object has changed
    one.keep(str(tmp_path), "what", [3], lambda line: None)
  assert first.recall(str(tmp_path), "what") == stamps("1").recall(str(tmp_path), "what") == [3]
  assert other.recall(str(tmp_path), "what") is unknown.recall(str(tmp_path), "what") is None


def test_files_that_were_written_just_now_are_read_again(tmp_path):
  keys = write(tmp_path / "a", "jsonl", WORDS[:9])
  first, _ = opened(tmp_path, keys)
  status = (tmp_path / "a" / "a.jsonl").stat()
  write(tmp_path / "a", "jsonl", [*WORDS[:4], WORDS[9], *WORDS[5:9]])
  real = os.stat

  def frozen(path, *arguments, **more):  # the clock of the file system has not moved on
    return status if str(path).endswith("a.jsonl") else real(path, *arguments, **more)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, "stat", frozen)
    assert opened(tmp_path, keys)[0].fingerprint() != first.fingerprint()


def test_a_known_corpus_is_not_opened_at_a_start(tmp_path, monkeypatch):
  keys = write(tmp_path / "a", "text", WORDS)
  settle(tmp_path / "a")
  first, _ = opened(tmp_path, keys, tokenizer_type="bpe")
  splits = corpus.hold_out(corpus.find("", str(tmp_path / "a")), 0.1)
  monkeypatch.setattr(corpus, "hold_out", lambda pieces, fraction: splits)
  monkeypatch.setattr(corpus, "_opened", None)
  assert opened(tmp_path, keys, tokenizer_type="bpe")[0].fingerprint() == first.fingerprint()


def test_a_cache_that_cannot_be_written_serves_a_corpus_that_was_touched(tmp_path, monkeypatch):
  keys = write(tmp_path / "a", "jsonl", WORDS[:50])
  settle(tmp_path / "a")
  first, _ = opened(tmp_path, keys)
  os.utime(tmp_path / "a" / "a.jsonl", (1, 1))
  settle(tmp_path / "a")
  from input_pipeline import cache
  from input_pipeline.input_errors import ConfigError

  def refuse(*arguments, **more):
    raise ConfigError("dataset_cache_directory=... cannot be written")

  monkeypatch.setattr(cache, "value", refuse)
  again, lines = opened(tmp_path, keys)
  assert again.fingerprint() == first.fingerprint()
  assert lines and all(line.startswith("The next start reads the files again:") for line in lines)


def test_files_in_place_are_sampled(tmp_path):
  """What is read in place is never read ahead: its ends, places spread over it, and the manifest's hash."""
  folder = tmp_path / "out" / "train"
  folder.parent.mkdir()
  keys = write(folder, "arrayrecord_uint16", WORDS)
  settle(folder)
  load = lambda: opened(tmp_path, keys, packing="none")[0].fingerprint()
  first, file = load(), folder / "a.array_record"
  content = file.read_bytes()
  changed = [*WORDS]
  for number in range(600, 900):
    changed[number] = changed[number].replace("word", "wood")
  write(folder, "arrayrecord_uint16", changed)
  assert file.stat().st_size == len(content) and load() != first
  file.write_bytes(content)
  assert load() == first
  (tmp_path / "out" / "manifest.json").write_text(
    json.dumps({"files": {"train": [{"file": "train/a.array_record", "sha256": "of another file"}]}})
  )
  os.utime(file)
  assert load() != first


PEAK = """
import resource, sys
from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from input_pipeline import workers
workers._SMALL = 10**12  # in this process
cfg = DataOptions(dataset_path=sys.argv[1], dataset_cache_directory=sys.argv[2], packing=sys.argv[3], eval_fraction=0)
make_loader(cfg, vocab_size=300, global_batch_size=1, split="train", log=lambda line: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("packing", few(["best_fit"], ["split", "best_fit", "none"]))
def test_a_large_text_is_prepared_in_little_memory(tmp_path, packing):
  peaks = []
  for size in (1, 13):
    folder = tmp_path / str(size)
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"The same line of text again and again.\n" * (size * 25_000))
    done = subprocess.run(
      [sys.executable, "-c", PEAK, str(folder), str(folder / "cache"), packing],
      capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    peaks.append(int(done.stdout.split()[-1]))
  assert peaks[1] < peaks[0] + 25, peaks  # MiB, for 12 MB more


@pytest.mark.parametrize(
  "packing, kind", few([("best_fit", "byte")], [("split", "bpe"), ("best_fit", "byte"), ("none", "bpe")])
)
def test_a_text_in_parts_has_the_windows_of_the_whole(tmp_path, monkeypatch, packing, kind):
  text = "".join(f"{number} caf\u00e9 \u65e5\u672c\r\n" + "x" * (number % 700) for number in range(2500))
  folder = tmp_path / "texts"
  folder.mkdir()
  for name, part in (("a", text), ("b", "short"), ("c", "\ufeff" + text[::-1]), ("d", "   "), ("e", text[:90_000])):
    (folder / f"{name}.txt").write_text(part, encoding="utf-8", newline="")
  found = []
  for whole, block, long in ((2**40, 2**18, 2**40), (50_000, 7001, 2**40), (1, 3000, 60_000)):
    monkeypatch.setattr(corpus, "_WHOLE", whole)
    monkeypatch.setattr(corpus, "_BLOCK", block)
    monkeypatch.setattr("input_pipeline.tokenizer._LONG", long)
    keys = {"dataset_type": "text", "dataset_path": str(folder), "packing": packing, "tokenizer_type": kind}
    keys |= {"dataset_cache_directory": str(tmp_path / f"cache-{len(found)}"), "max_target_length": 100}
    loader, _ = opened(tmp_path, keys)
    (entry,) = (tmp_path / f"cache-{len(found)}").glob("corpus-*")
    meta = json.loads((entry / "meta.json").read_text())
    found.append(((entry / "train.records").read_bytes(), (entry / "eval.records").read_bytes(), meta))
    assert loader.num_examples
  assert found[0] == found[1] == found[2]
