"""Training data as a pure function of (seed, step, row): a checkpoint needs to save one number.

Documents (text, JSONL, Parquet, ArrayRecord, TFDS, Hugging Face datasets, any grain.MapDataset; local or in an object
store) are tokenised and packed once, into a file of windows in a cache, and read by index in a shuffled order:

  from input_pipeline.loader import make_loader
  from input_pipeline.options import DataOptions
  options = DataOptions(dataset_path="my_texts", max_target_length=512, tokenizer_type="bpe")
  loader = make_loader(options, vocab_size=8192, global_batch_size=16, split="train")
  batch = loader.batch(step)                          # the same on every machine, for any step
  rows = loader.batch(step, np.array([4, 5]))         # only the rows of this process
  position = loader.cursor(step)                      # JSON for a checkpoint; loader.resume continues there

Modules, from the bottom: `errors`, `locks`, `progress`, `open_files`, `folders`, `remote`, `data_files` (which files
are meant), `options`, `packages`, `workers` (processes), `batch`, `documents`, a module for each format, `elements`
(datasets in Python), `corpus` (text), `datasets`, `tokenizer`, `windows`, `best_fit`, `long_text`, `store`, `cache`,
`prepare`, `order`, `schedule`, `source`, `synthetic`, `prepared`, `in_place`, `mixture`, `loader`, `prefetch`,
`describe`.
"""
