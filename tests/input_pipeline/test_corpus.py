"""Files and their order, the split into training and held-out text, documents, and errors in bad files."""

from __future__ import annotations

import collections
import json
import os
import re

import numpy
import pytest

from input_pipeline import contents, corpus, datasets
from input_pipeline.documents import BadRecords, Documents
from input_pipeline.options import DataOptions
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


def test_a_single_file(tmp_path):
  write(tmp_path, {"b.txt": "hello\nthere", "c.txt": "no"})
  pieces = corpus.find("dataset_path", str(tmp_path / "b.txt"))
  assert names(pieces) == ["b.txt"] and texts(pieces) == ["hello\nthere"]


def test_home_is_expanded(tmp_path, monkeypatch):
  write(tmp_path, {"b.txt": "b"})
  monkeypatch.setenv("HOME", str(tmp_path))
  assert names(corpus.find("dataset_path", "~/b.txt")) == ["b.txt"]


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


def test_links_to_their_own_folder_do_not_loop(tmp_path):
  (tmp_path / "a").symlink_to(".")
  (tmp_path / "b").symlink_to(".")
  with pytest.raises(ConfigError, match="has no text"):
    corpus.find("dataset_path", str(tmp_path))


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


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
  def refuse(folder):
    raise PermissionError(13, "Permission denied", folder)

  monkeypatch.setattr(os, "listdir", refuse)  # root ignores file modes
  with pytest.raises(ConfigError, match=r"cannot be listed \(Permission denied\)"):
    corpus.find("dataset_path", str(tmp_path))


def test_standard_library():
  pieces = corpus.find("dataset_path", "")
  assert names(pieces) == sorted(names(pieces))
  assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names(pieces))
  folders = {folder for name in names(pieces) for folder in name.split("/")[:-1]}
  assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
  assert all(name.endswith(".py") for name in names(pieces))
  assert sum(piece.size for piece in pieces) > 5e6
  assert all(len(texts([piece])) == 1 for piece in pieces)


def test_standard_library_without_sources(tmp_path, monkeypatch):
  write(tmp_path, {"latin.py": "# caf\xe9".encode("latin-1"), "site-packages/a.py": "a"})
  monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
  with pytest.raises(ConfigError, match="dataset_path is empty, and the interpreter has no library sources"):
    corpus.find("dataset_path", "")
  write(tmp_path, {"good.py": "print()"})
  assert names(corpus.find("dataset_path", "")) == ["good.py"]


def test_the_split_depends_on_names_and_sizes_only(tmp_path):
  files = {f"d{i % 7}/{i}.txt": "x" * (i % 5 + 1) + "\n" for i in range(400)}
  write(tmp_path / "one", files)
  write(tmp_path / "two", {name: text.replace("x", "y") for name, text in files.items()})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path / "one")), 0.1)
  other_train, other_held_out = corpus.hold_out(corpus.find("", str(tmp_path / "two")), 0.1)
  assert names(train) == names(other_train) and names(held_out) == names(other_held_out)
  assert len(held_out) == 40 and len(train) == 360
  assert names(train) == sorted(names(train)) and not set(names(train)) & set(names(held_out))


def test_each_folder_is_held_out_from(tmp_path):
  """One of every ten files in the order of names: each folder with 20 files contains a whole group of ten."""
  write(tmp_path, {f"{folder}/{i}.txt": "text" for folder in "abcdefgh" for i in range(20)})
  _, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.1)
  assert {name[0] for name in names(held_out)} == set("abcdefgh")


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_each_side_gets_something(tmp_path, fraction):
  write(tmp_path, {name: f"{name}\n" * 3 for name in ("a.txt", "b.txt", "c.txt")})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), fraction)
  assert sorted("".join(texts(train + held_out)).split()) == sorted(["a.txt", "b.txt", "c.txt"] * 3)
  assert train and held_out


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(20))
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


def test_no_file_dominates_the_held_out_text(tmp_path):
  write(tmp_path, {"a.txt": "twelve bytes\n" * 100_000} | {f"{i}.txt": "twelve bytes\n" * 100 for i in range(1000)})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.05)
  large = [piece for piece in held_out if piece.name == "a.txt"]
  total = sum(piece.size for piece in held_out)
  assert len(large) == 8 and max(piece.size for piece in held_out) < total / 10
  assert sum(piece.size for piece in large) / total == pytest.approx(0.5, abs=0.2)  # as in the training text
  # Adjacent parts of the large file that stay for training are joined.
  assert len([piece for piece in train if piece.name == "a.txt"]) <= len(large) + 1


def test_a_file_of_one_line_is_held_out_only_if_it_is_small(tmp_path):
  write(tmp_path, {"a.txt": "a" * 1000, "b.txt": "b"})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.05)
  assert names(train) == ["a.txt"] and names(held_out) == ["b.txt"]


def test_training_and_held_out_text_of_the_standard_library_are_alike():
  """One file once had 65 % of the held-out bytes."""
  train, held_out = corpus.hold_out(corpus.find("", ""), 0.05)
  sizes, shares = collections.Counter(), []
  for piece in held_out:
    sizes[piece.name] += piece.size
  assert max(sizes.values()) < 0.2 * sum(sizes.values()) and len(sizes) > 20
  for pieces in (train, held_out):
    text = "".join(texts(pieces))
    counts = collections.Counter(re.findall(r"\w+|\s+|[^\w\s]", text))
    frequent = ("self", "def", "the", "(", "#", "0", "None", "import")
    shares.append(numpy.array([counts[word] / counts.total() for word in frequent]))
  numpy.testing.assert_allclose(shares[0], shares[1], rtol=0.35)


def test_fractions_zero_and_one(tmp_path):
  write(tmp_path, {"a.txt": "a", "b.txt": "b"})
  pieces = corpus.find("", str(tmp_path))
  assert corpus.hold_out(pieces, 0.0) == (pieces, [])
  with pytest.raises(ConfigError, match="eval_fraction=1: leaves nothing"):
    datasets.find(DataOptions(dataset_path=str(tmp_path), eval_fraction=1.0))


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.9, 0.999])
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


@pytest.mark.parametrize("content", ["one line", "one line\n", "x"])
def test_a_single_line_is_not_cut(tmp_path, content):
  write(tmp_path, {"a.txt": content})
  pieces = corpus.find("", str(tmp_path))
  assert corpus.hold_out(pieces, 0.5) == (pieces, [])


def test_documents_of_json_lines(tmp_path):
  lines = ['{"text": "one\\nline", "id": 3}', "", '{"text": ""}', "  ", '{"text": "\\u00e9\\ud800"}']
  write(tmp_path, {"a.jsonl": "\n".join(lines)})
  assert texts(corpus.find("", str(tmp_path))) == ["one\nline", "\u00e9\ud800"]


@pytest.mark.parametrize(
  "bad", ['{"text": "cut', '["text"]', '{"body": "x"}', '{"text": 3}', "plain", b'{"text": "\xff"}']
)
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


def test_a_json_line_that_is_nested_too_deep_is_named(tmp_path):
  write(tmp_path, {"a.jsonl": '{"text": "fine"}\n' + 100_000 * "["})
  with pytest.raises(ConfigError, match=r"a\.jsonl:2: nested too deep"):
    texts(corpus.find("", str(tmp_path)))


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
