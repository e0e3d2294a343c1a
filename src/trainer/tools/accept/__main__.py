"""`python -m trainer.tools.accept OUT`: shows on the machines at hand that the promises of this project hold.

It trains a small model with the command of the launcher, kills a slice, stops and restarts runs, takes the storage
away, and compares every run with one without faults. OUT gets card.yml, card.html and the folders of the runs. --check
reads a card again, and compares it with another one. docs/accept.md has the lines to type for each launcher.

Exit code 0: all rows hold that apply; 1: one does not; 2: wrong input; 130: Ctrl-C, which deletes OUT.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from trainer import commands
from trainer.config.errors import ConfigError
from trainer.observe import screen
from trainer.tools.accept import card as card_lib
from trainer.tools.accept import launchers
from trainer.tools.accept.rows import PARTS, Acceptance

_OF_ACCEPT = "base_output_directory run_name steps grain_train_files num_slices cluster fault_injection".split()


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__ or "")
  parser.add_argument("out", metavar="OUT", help="a new folder, which all hosts reach; with --check a second card")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="of every run, such as dtype=bfloat16")
  parser.add_argument("--launcher", choices=launchers.NAMES, default="local", help="starts the slices (default: local)")
  parser.add_argument("--slices", type=int, default=3, help="slices of the runs (default: 3)")
  parser.add_argument("--listen", default="", metavar="HOST:PORT", help="agents and slurm: address of the supervisor")
  parser.add_argument("--command", default="", help="command: what stands before CONFIG.yml key=value")
  parser.add_argument("--kill", default="", metavar="COMMAND", help="kills one slice, where accept cannot")
  parser.add_argument("--budget", type=float, default=15.0, metavar="MINUTES", help="time of all rows (default: 15)")
  parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="only these of %(default)s")
  parser.add_argument("--check", metavar="CARD", help="reads a card again, and compares it with the card OUT")
  return commands.main(parser, lambda options: _check(options) if options.check else _accept(options), argv)


def _accept(options: argparse.Namespace) -> int:
  wrong = [key for key in options.keys if "=" not in key or key.partition("=")[0] in _OF_ACCEPT]
  if wrong:
    raise ConfigError(f"{wrong[0]}: accept sets this key, or it is no key=value.\nRemove it.")
  if unknown := set(parts := options.only.split(",")) - set(PARTS):
    raise ConfigError(f"--only {min(unknown)}: is no part.\nChoose among {', '.join(PARTS)}.")
  if not options.budget > 0:
    raise ConfigError(f"--budget {options.budget:g}: must be more than 0 minutes.")
  if "://" in options.out:
    raise ConfigError(
      f"{options.out}: accept damages checkpoints, and moves their folder.\nGive a folder, perhaps mounted."
    )
  out = Path(options.out).absolute()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ConfigError(f"{options.out}: is there already.\nGive a folder that is not there, or is empty.")
  launcher = launchers.of_options(options)
  out.mkdir(parents=True, exist_ok=True)
  begun = time.monotonic()
  again = f"python -m trainer.tools.accept --launcher {launcher.name} --slices {launcher.slices}"
  given = [f"--{name} ..." for name in ("listen", "command", "kill") if getattr(options, name)]
  found = Acceptance(launcher, out, options.keys, options.budget, " ".join([again, *given]))
  try:
    found.play(parts)
  except KeyboardInterrupt:
    shutil.rmtree(out)
    raise
  card = card_lib.made(found, (time.monotonic() - begun) / 60)
  if "undisturbed" in parts:
    reference = card_lib.read(str(card_lib.REFERENCE))
    card.rows.append(card_lib.compared(card, reference, found.command("undisturbed")))
  (out / "card.yml").write_text(card.text())
  (out / "card.html").write_text(card_lib.page(card))
  print(f"{'All rows hold' if card.holds else 'NOT ALL ROWS HOLD'}: {out}/card.yml, card.html", flush=True)
  return 0 if card.holds else 1


def _check(options: argparse.Namespace) -> int:
  card, other = card_lib.read(options.check), card_lib.read(options.out)
  row = card_lib.compared(card, other)
  print(f"{row.name}: expected {row.expected}; {row.seen}", *card_lib.differences(card, other), sep="\n")
  return 0 if card.holds and row.holds is not False else 1


if __name__ == "__main__":
  screen.command(main)
