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

Exit codes: 0: complete. 1: a process was killed. 2: the input is wrong. 130: Ctrl-C.
"""

from __future__ import annotations

import argparse

from input_pipeline.workers import WorkerLost, cores
from trainer import commands
from trainer.config import ConfigError, load
from trainer.config.option_types import real, whole
from trainer.observe import screen
from trainer.tools.tokenize import writing


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("arguments", nargs="+", metavar="CONFIG.yml key=value", help="as for python -m trainer")
  parser.add_argument("--output", metavar="FOLDER", help="local folder, new or of the same command")
  parser.add_argument("--preview", type=whole(1), metavar="N", help="print the first N documents")
  parser.add_argument("--records", choices=("documents", "windows"), default="documents")
  parser.add_argument("--processes", type=whole(1), default=cores(), help="default: the number of cores")
  parser.add_argument("--part-megabytes", type=real(1e-6, 1e6), default=128.0, help="input of a file (default: 128)")
  return commands.main(parser, _tokenize, argv)


def _tokenize(options: argparse.Namespace) -> None:
  if (options.output is None) == (options.preview is None):
    raise ConfigError("Give --output FOLDER or --preview N.")
  config = load(options.arguments)
  if options.preview:
    writing.preview(config, options.preview)
    return
  try:
    writing.run(config, options.output, options.records, round(options.part_megabytes * 1e6), options.processes)
  except WorkerLost as error:
    raise WorkerLost(f"{error} The same command continues; fewer --processes need less memory.") from error


if __name__ == "__main__":
  screen.command(main)
