"""Files and their order, the split into training and held-out text, documents, and errors in bad files."""

from __future__ import annotations

import json
import os

import numpy
import pytest

from input_pipeline import contents, corpus
from input_pipeline.documents import BadRecords, Documents
from trainer.config.errors import ConfigError


def write(root, files: dict[str, str | bytes]) -> None:
  for name, content in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def names(pieces) -> list[str]:
  return [piece.name for piece in pieces]


def texts(pieces) -> list[str]:
  documents = Documents("", pieces, corpus.documents, "text", corpus.cut_documents)
  return [text for _, text in documents.valid(BadRecords(0))]


def digest(pieces) -> str:
  return contents.read(Documents("", pieces, corpus.documents, "text", corpus.cut_documents), 0)


def test_files_in_the_order_of_their_names(tmp_path):
  write(tmp_path, {"b.txt": "b", "a/z.md": "z", "a/c.py": "c", "a.jsonl": "{}", "A.txt": "A"})
  write(tmp_path, {"x.bin": "x", ".hidden.txt": "h", ".git/config.txt": "g", "empty.txt": ""})
  assert names(corpus.find("dataset_path", str(tmp_path))) == ["A.txt", "a.jsonl", "a/c.py", "a/z.md", "b.txt"]


def test_unusable_paths_are_refused(tmp_path):
  write(tmp_path, {"image.png": "x", "hollow/empty.txt": "", "hollow/.hidden.txt": "h"})
  (tmp_path / "void").mkdir()
  for path, message in {
    "nowhere": "dataset_path=.*nowhere does not exist",
    "image.png": r"ends in '\.png'.*one of",
    "void": "void has no text",
    "hollow": "hollow has no text",
  }.items():
    with pytest.raises(ConfigError, match=message):
      corpus.find("dataset_path", str(tmp_path / path))


def test_links_are_followed_once_and_broken_links_are_skipped(tmp_path):
  write(tmp_path, {"outside/inner/b.txt": "b", "data/z/a.txt": "a", "data/z/c.png": "c", "single.md": "m"})
  data = tmp_path / "data"
  for name, target in {"a": ".", "b": ".", "y": "z", "w": "../outside", "v": "../outside/inner"}.items():
    (data / name).symlink_to(target)
  for name, target in {"gone.txt": "nowhere", "self.txt": "self.txt", "one.md": "../single.md"}.items():
    (data / name).symlink_to(target)
  os.mkfifo(data / "pipe.txt")
  # z has its own name although y links to it; inner has the name of the first link to it.
  assert names(corpus.find("dataset_path", str(data))) == ["one.md", "v/b.txt", "z/a.txt"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  write(tmp_path, {"a.txt": "aaaa\n" * 9, "b.jsonl": '{"text": "b"}\n' * 9})
  pieces = corpus.find("", str(tmp_path))
  for piece in pieces:
    piece.path.unlink()
    for read in (lambda piece: texts([piece]), lambda piece: digest([piece])):
      with pytest.raises(ConfigError, match=rf"{piece.name} cannot be read \(No such file or directory\)"):
        read(piece)
    with pytest.raises(ConfigError, match=f"{piece.name} cannot be read"):
      corpus.hold_out([piece], 0.5)


def test_standard_library():
  pieces = corpus.find("dataset_path", "")
  assert names(pieces) == sorted(names(pieces))
  assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names(pieces))
  folders = {folder for name in names(pieces) for folder in name.split("/")[:-1]}
  assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
  assert all(name.endswith(".py") for name in names(pieces))
  assert sum(piece.size for piece in pieces) > 5e6
  assert all(len(texts([piece])) == 1 for piece in pieces)


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_the_held_out_share_is_near_the_fraction_for_any_file_sizes(tmp_path, seed, fraction):
  """Between half and three times the fraction, never all text. Each line is on exactly one side."""
  random = numpy.random.default_rng(seed)
  sizes = 2 ** random.uniform(0, 12, random.integers(2, 30))
  files = {f"{seed}-{i}.txt": "".join(f"{i} {j}\n" for j in range(int(size) + 200)) for i, size in enumerate(sizes)}
  write(tmp_path, files)
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), fraction)
  total = sum(len(text) for text in files.values())
  share = sum(piece.size for piece in held_out) / total
  assert fraction / 2 <= share + 0.01 and share <= 1 - (1 - fraction) ** 3 + 0.01
  lines = "".join(texts(train) + texts(held_out)).splitlines()
  assert train and sorted(lines) == sorted("".join(files.values()).splitlines())


@pytest.mark.parametrize("fraction", [0.001, 0.5])
def test_parts_of_a_single_file_are_held_out(tmp_path, fraction):
  lines = ["\u00e9" * (i % 9) + f" line {i}\n" for i in range(1000)]
  write(
    tmp_path, {"book.txt": "".join(lines), "book.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines)}
  )
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path / "book.txt")), fraction)
  assert train and held_out and all(text.endswith("\n") for text in texts(train + held_out))
  assert "".join(texts(sorted(train + held_out, key=lambda piece: piece.start))) == "".join(lines)
  size = sum(piece.size for piece in held_out)
  assert abs(size / (size + sum(piece.size for piece in train)) - fraction) < 0.02
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path / "book.jsonl")), fraction)
  assert sorted(texts(train) + texts(held_out)) == sorted(lines) and texts(train) and texts(held_out)


def test_documents_of_json_lines(tmp_path):
  lines = ['{"text": "one\\nline", "id": 3}', "", '{"text": ""}', "  ", '{"text": "\\u00e9\\ud800"}']
  write(tmp_path, {"a.jsonl": "\n".join(lines)})
  assert texts(corpus.find("", str(tmp_path))) == ["one\nline", "\u00e9\ud800"]


@pytest.mark.parametrize("bad", ['{"text": "cut', '{"text": 3}', b'{"text": "\xff"}'])
def test_a_bad_json_line_is_named(tmp_path, bad):
  good = b'{"text": "fine"}\n'
  write(tmp_path, {"a.jsonl": good * 40 + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n" + good})
  with pytest.raises(ConfigError, match=r"a\.jsonl:41: .*Every line must be like"):
    texts(corpus.find("", str(tmp_path)))
  # The line number counts from the start of the file, also in a part of it.
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.2)
  assert train and held_out and train[-1].start > 0
  with pytest.raises(ConfigError, match=r"a\.jsonl:41: "):
    texts(train + held_out)


def test_text_that_is_not_utf8_is_named(tmp_path):
  write(tmp_path, {"a.txt": b"fine\nalso fine\ncaf\xe9\n"})
  with pytest.raises(ConfigError, match=r"a\.txt:3: not UTF-8"):
    texts(corpus.find("", str(tmp_path)))


def test_digest_sees_names_and_contents_but_not_the_place(tmp_path):
  files = {"a.txt": "a", "d/b.txt": "b"}
  variants = [files, files, files | {"a.txt": "A"}, {"a.txt": "a", "d/c.txt": "b"}, {"a.txt": "a"}, {"a.txt": "ab"}]
  digests = []
  for number, variant in enumerate(variants):
    write(tmp_path / str(number), variant)
    digests.append(digest(corpus.find("", str(tmp_path / str(number)))))
  assert digests[0] == digests[1]
  assert len(set(digests)) == len(variants) - 1
  os.utime(tmp_path / "0" / "a.txt", (1, 1))
  assert digest(corpus.find("", str(tmp_path / "0"))) == digests[0]
