"""Layouts (the boxes of tensors that each rank holds) as data, and pure functions that read layouts.

- ``box``: rectangular regions of tensors.
- ``shardings``: regular cuts of tensors.
- ``layout``: the layout of a rank, and the catalogue of all ranks.
- ``save_plan``: the parts of boxes that each rank writes.
- ``coverage``: the test whether boxes cover a tensor.
- ``replica_digests``: the comparison of copies of the state.
- ``layout_completion``: the optimizer entries that a rank could not publish in its layout.
- ``value_sources``: the ranks from which plain values are loaded.
"""
