"""Which files are read, in which order, what is held out, and what is wrong with a bad one."""

from __future__ import annotations

import json
import os

import numpy
import pytest

from trainer.data import corpus


def write(root, files: dict[str, str | bytes]) -> None:
  for name, content in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def names(pieces) -> list[str]:
  return [piece.name for piece in pieces]


def texts(pieces) -> list[str]:
  return [text for piece in pieces for text in corpus.documents(piece)]


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
    "void": "void holds no text",
    "hollow": "hollow holds no text",
  }.items():
    with pytest.raises(ValueError, match=message):
      corpus.find("dataset_path", str(tmp_path / path))


def test_links_are_followed_once_and_those_to_nothing_are_no_files(tmp_path):
  write(tmp_path, {"outside/inner/b.txt": "b", "data/z/a.txt": "a", "data/z/c.png": "c", "single.md": "m"})
  data = tmp_path / "data"
  for name, target in {"a": ".", "b": ".", "y": "z", "w": "../outside", "v": "../outside/inner"}.items():
    (data / name).symlink_to(target)
  for name, target in {"gone.txt": "nowhere", "self.txt": "self.txt", "one.md": "../single.md"}.items():
    (data / name).symlink_to(target)
  os.mkfifo(data / "pipe.txt")
  # z under its own name, though y leads there too; inner by the link that comes first.
  assert names(corpus.find("dataset_path", str(data))) == ["one.md", "v/b.txt", "z/a.txt"]


def test_a_link_that_leads_back_ends(tmp_path):
  (tmp_path / "a").symlink_to(".")
  (tmp_path / "b").symlink_to(".")
  with pytest.raises(ValueError, match="holds no text"):
    corpus.find("dataset_path", str(tmp_path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  write(tmp_path, {"a.txt": "aaaa\n" * 9, "b.jsonl": '{"text": "b"}\n' * 9})
  pieces = corpus.find("", str(tmp_path))
  for piece in pieces:
    piece.path.unlink()
    for read in (lambda piece: texts([piece]), lambda piece: corpus.digest([piece])):
      with pytest.raises(ValueError, match=rf"{piece.name} cannot be read \(No such file or directory\)"):
        read(piece)
    with pytest.raises(ValueError, match=f"{piece.name} cannot be read"):
      corpus.hold_out([piece], 0.5)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
  def refuse(folder):
    raise PermissionError(13, "Permission denied", folder)

  monkeypatch.setattr(os, "listdir", refuse)  # a mode would not stop root
  with pytest.raises(ValueError, match=r"cannot be listed \(Permission denied\)"):
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
  with pytest.raises(ValueError, match="dataset_path is empty, and the interpreter has no library sources"):
    corpus.find("dataset_path", "")
  write(tmp_path, {"good.py": "print()"})
  assert names(corpus.find("dataset_path", "")) == ["good.py"]


def test_held_out_files_depend_on_names_only(tmp_path):
  write(tmp_path / "one", {f"d{i % 7}/{i}.txt": "x" * (i + 1) for i in range(400)})
  write(tmp_path / "two", {f"d{i % 7}/{i}.txt": "other" for i in range(400)})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path / "one")), 0.1)
  other_train, other_held_out = corpus.hold_out(corpus.find("", str(tmp_path / "two")), 0.1)
  assert names(train) == names(other_train) and names(held_out) == names(other_held_out)
  assert 20 < len(held_out) < 60 and len(train) + len(held_out) == 400
  assert names(train) == sorted(names(train)) and not set(names(train)) & set(names(held_out))
  # A larger share holds out the same files and more; more files change no other file's side.
  assert set(held_out) <= set(corpus.hold_out(corpus.find("", str(tmp_path / "one")), 0.2)[1])
  write(tmp_path / "one", {"new.txt": "new"})
  again = corpus.hold_out(corpus.find("", str(tmp_path / "one")), 0.1)[1]
  assert set(names(again)) - {"new.txt"} == set(names(held_out))


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_each_side_gets_something(tmp_path, fraction):
  write(tmp_path, {name: f"{name}\n" * 3 for name in ("a.txt", "b.txt", "c.txt")})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), fraction)
  assert sorted("".join(texts(train + held_out)).split()) == sorted(["a.txt", "b.txt", "c.txt"] * 3)
  assert train and held_out


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_out_is_about_the_fraction_however_the_sizes_differ(tmp_path, seed, fraction):
  """Within half of it and three times as much, never all; every line is on one side."""
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


def test_a_large_file_is_not_held_out_whole(tmp_path):
  write(tmp_path, {"a.txt": "twelve bytes\n" * 100_000, "b.txt": "twelve bytes\n" * 100})
  train, (held_out,) = corpus.hold_out(corpus.find("", str(tmp_path)), 0.05)
  assert names(train) == ["a.txt", "b.txt"] and held_out.name == "a.txt"
  assert held_out.start == train[0].stop and held_out.size == pytest.approx(0.05 * 13 * 100_100, abs=13)


def test_where_no_file_can_be_cut_what_fits_is_held_out(tmp_path):
  write(tmp_path, {"a.txt": "a" * 1000, "b.txt": "b"})
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.05)
  assert names(train) == ["a.txt"] and names(held_out) == ["b.txt"]


def test_the_standard_library_is_split_by_names_alone():
  """The quickstart's numbers depend on it."""
  pieces = corpus.find("", "")
  _, held_out = corpus.hold_out(pieces, 0.05)
  assert held_out == [piece for piece in pieces if corpus._place(piece) < 0.05]


def test_fractions_nought_and_one(tmp_path):
  write(tmp_path, {"a.txt": "a", "b.txt": "b"})
  pieces = corpus.find("", str(tmp_path))
  assert corpus.hold_out(pieces, 0.0) == (pieces, [])
  with pytest.raises(ValueError, match="eval_fraction=1 leaves nothing"):
    corpus.hold_out(pieces, 1.0)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_end_of_a_single_file_is_held_out(tmp_path, fraction):
  lines = ["\u00e9" * (i % 9) + f" line {i}\n" for i in range(100)]
  write(
    tmp_path, {"book.txt": "".join(lines), "book.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines)}
  )
  (train,), (held_out,) = corpus.hold_out(corpus.find("", str(tmp_path / "book.txt")), fraction)
  left, right = texts([train]), texts([held_out])
  assert left[0] + right[0] == "".join(lines) and left[0].endswith("\n")
  assert abs(held_out.size / (train.size + held_out.size) - fraction) < 0.02
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path / "book.jsonl")), fraction)
  assert texts(train) + texts(held_out) == lines and texts(train) and texts(held_out)


@pytest.mark.parametrize("content", ["one line", "one line\n", "x"])
def test_a_single_line_is_not_cut(tmp_path, content):
  write(tmp_path, {"a.txt": content})
  pieces = corpus.find("", str(tmp_path))
  assert corpus.hold_out(pieces, 0.5) == (pieces, [])


def test_a_long_last_line_is_held_out_whole(tmp_path):
  write(tmp_path, {"a.txt": "short\n" + "long " * 100 + "\n"})
  _, (held_out,) = corpus.hold_out(corpus.find("", str(tmp_path)), 0.1)
  assert texts([held_out]) == ["long " * 100 + "\n"]


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
  with pytest.raises(ValueError, match=r"a\.jsonl:41: .*every line must be like"):
    texts(corpus.find("", str(tmp_path)))
  # In a held-out part the number still counts from the beginning of the file.
  train, held_out = corpus.hold_out(corpus.find("", str(tmp_path)), 0.2)
  assert texts(train)
  with pytest.raises(ValueError, match=r"a\.jsonl:41: "):
    texts(held_out)


def test_a_json_line_that_is_nested_too_deep_is_named(tmp_path):
  write(tmp_path, {"a.jsonl": '{"text": "fine"}\n' + 100_000 * "["})
  with pytest.raises(ValueError, match=r"a\.jsonl:2: nested too deep"):
    texts(corpus.find("", str(tmp_path)))


def test_text_that_is_not_utf8_is_named(tmp_path):
  write(tmp_path, {"a.txt": b"fine\nalso fine\ncaf\xe9\n"})
  with pytest.raises(ValueError, match=r"a\.txt:3: not UTF-8"):
    texts(corpus.find("", str(tmp_path)))


def test_digest_sees_names_and_contents_but_not_the_place(tmp_path):
  files = {"a.txt": "a", "d/b.txt": "b"}
  variants = [files, files, files | {"a.txt": "A"}, {"a.txt": "a", "d/c.txt": "b"}, {"a.txt": "a"}, {"a.txt": "ab"}]
  digests = []
  for number, variant in enumerate(variants):
    write(tmp_path / str(number), variant)
    digests.append(corpus.digest(corpus.find("", str(tmp_path / str(number)))))
  assert digests[0] == digests[1]
  assert len(set(digests)) == len(variants) - 1
  os.utime(tmp_path / "0" / "a.txt", (1, 1))
  assert corpus.digest(corpus.find("", str(tmp_path / "0"))) == digests[0]
