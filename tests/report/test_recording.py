"""The recording of README: the picture has the lines of the run in their order, and no others."""

from __future__ import annotations

import xml.etree.ElementTree

from end_to_end import recording

LOG = """Devices: 3 slices of 1 cpu (multiprocess)
completed step: 1, seconds: 0.100, TFLOP/s/device: 0.1, loss: 5.0, lr: 1e-3, slices: 3, eta: 0:01:00
step=1 elastic_manager.good_slice_count=3
supervisor: Member 1 killed by SIGKILL.
Recovered from slice_down of slice 1 in 0.07 s: 3 -> 2 slices, 0 completed steps lost
12:00:00 completed step: 2, seconds: 0.170, TFLOP/s/device: 0.1, loss: 4.9, lr: 1e-3, slices: 2, eta: 0:01:00
completed step: 3, seconds: 0.100, loss: 4.8, slices: 2
completed step: 4, seconds: 0.100, loss: 4.7, slices: 2
Recovered from slice_up of slice 1 in 0.1 s: 2 -> 3 slices, 0 completed steps lost
completed step: 5, seconds: 0.100, loss: 4.6, slices: 3 & more
""".splitlines()


def texts(picture: str) -> list[str]:
  tree = xml.etree.ElementTree.fromstring(picture)
  return [element.text for element in tree.iter("{http" + "://www.w3.org/2000/svg}text")]


def test_the_picture_has_the_lines_of_the_run_in_their_order():
  lines = [(float(number), text) for number, text in enumerate(LOG)]
  shown = texts(recording.picture(recording.scene(lines, killed=2.5, pid=77), "0.07 s"))
  assert shown[-1] == "0.07 s" and shown[0] == f"$ {recording.COMMAND}"
  kill = shown.index("$ kill -9 77")
  assert shown[kill - 1] == "completed step: 1, seconds: 0.100, ..., loss: 5.0, ..., slices: 3, ..."
  assert shown[kill + 1] == LOG[3] and shown[kill + 2] == LOG[4]
  assert shown[kill + 3].startswith("12:00:00 completed step: 2, seconds: 0.170, ..., loss: 4.9")
  assert shown[-3:-1] == [LOG[8], LOG[9]] and not any("elastic_manager" in line for line in shown)


def test_the_picture_in_the_repository_is_one_of_this_command():
  shown = texts(recording.PICTURE.read_text())
  assert shown[0] == f"$ {recording.COMMAND}" and shown[-1].endswith("from kill -9 to the next step, no steps lost")
  assert any(line.startswith("$ kill -9 ") for line in shown)
  assert f"{shown[-1]}](docs/images/kill.svg)" in (recording.ROOT / "README.md").read_text(), "Correct README"
