"""Replacements for packages of other tools: ``mindio_ttp`` and ``taskd``, opt-in. See docs/compat.md.

``holdfast compat install`` makes both packages importable for all scripts of this Python installation. A line
``import holdfast.compat.install`` makes them importable for one script.
"""
