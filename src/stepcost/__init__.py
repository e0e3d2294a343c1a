"""Reads a compiled program: memory traffic, FLOPs, communication, and its schedule played on the clock of a chip.

  import stepcost.hlo, stepcost.costs, stepcost.collectives, stepcost.simulation, stepcost.prices, stepcost.chips
  module = stepcost.hlo.parse(compiled.as_text())
  stepcost.costs.count(module)                                   # FLOPs, bytes, the compiler's cycles
  stepcost.collectives.find(module, slice_of)                    # what is sent inside a slice and between slices
  rates = stepcost.prices.rates(stepcost.chips.find("v5e"))
  stepcost.simulation.simulate(module, slice_of, rates)          # the time of one execution, and what is exposed

`topologies` describes TPU slices and GPUs to compile for without having them.

Modules, from the bottom: `hlo` (the text of a module), `chips` (peak rates), `gpus`, `topologies`, `collectives`,
`custom_calls` (kernels), `costs`, `prices` (rates), `hlo_events` (the actions), `simulation`, `formats`.
"""
