"""`python -m trainer.tools.tokenize CONFIG.yml [key=value ...] --output FOLDER`: tokenises a dataset into ArrayRecord.

The keys of the configuration name the documents, the tokenizer and the splits, as for training. FOLDER gets train/ and
eval/ with files of records, tokenizer.json, and manifest.json with hashes of the documents and of all output files, the
settings and the counts. The last line of the output has the keys to train with.

--records=documents (default): a record has the token ids of a document, to be packed when a run prepares its data.
--records=windows: a record is an example of max_target_length tokens, packed with the key `packing`. It is read in
place: nothing is prepared or copied.

Conversations need --records=windows: their windows also have what the model is trained to say.

--preview=N writes nothing. It prints the first N documents as the model gets them, with the trained tokens in colour,
or in [[ ]] if the output is no terminal.

The work is done in parts of --part-megabytes of input, one output file each, by --processes processes. After a kill at
any moment, the same command continues. The output does not depend on kills or on the number of processes.

--ray=ADDRESS: the parts are tasks of a Ray cluster, one CPU each, and their files come to FOLDER on this machine. All
nodes need this program and must see the input files. A task that is lost is tried again, at most five times in all.

Exit codes: 0: complete. 1: a process or task was killed. 2: the input is wrong. 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools

from input_pipeline.workers import WorkerLost, cores
from trainer import commands
from trainer.config import ConfigError, load
from trainer.config.option_types import real, whole
from trainer.observe import screen
from trainer.tools.tokenize import on_ray, run


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("arguments", nargs="+", metavar="CONFIG.yml key=value", help="as for python -m trainer")
  parser.add_argument("--output", metavar="FOLDER", help="local folder, new or of the same command")
  parser.add_argument("--preview", type=whole(1), metavar="N", help="print the first N documents")
  parser.add_argument("--records", choices=("documents", "windows"), default="documents")
  place = parser.add_mutually_exclusive_group()
  place.add_argument("--processes", type=whole(1), default=cores(), help="default: the number of cores")
  place.add_argument(
    "--ray", metavar="ADDRESS", help="a Ray cluster: auto, HOST:PORT on one of its nodes, or ray://HOST:10001"
  )
  parser.add_argument("--part-megabytes", type=real(1e-6, 1e6), default=128.0, help="input of a file (default: 128)")
  return commands.main(parser, _tokenize, argv)


def _tokenize(options: argparse.Namespace) -> None:
  if (options.output is None) == (options.preview is None):
    raise ConfigError("Give --output FOLDER or --preview N.")
  config = load(options.arguments)
  if options.preview:
    run.preview(config, options.preview)
    return
  part_bytes = round(options.part_megabytes * 1e6)
  with contextlib.ExitStack() as stack:
    write_parts: run.WriteParts = functools.partial(run.in_processes, options.processes)
    if options.ray is not None:
      write_parts = stack.enter_context(on_ray.connected(options.ray))
    try:
      run.run(config, options.output, options.records, part_bytes, write_parts)
    except WorkerLost as error:
      remedy = "." if options.ray else "; fewer --processes need less memory."
      raise WorkerLost(f"{error} The same command continues{remedy}") from error


if __name__ == "__main__":
  screen.command(main)
