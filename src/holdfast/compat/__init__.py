"""Replacements for packages of other tools, on top of Holdfast: ``mindio_ttp`` and ``taskd``, opt-in. See
docs/compat.md.

``holdfast compat install`` makes both importable for all scripts of this Python, ``import holdfast.compat.install`` for
one script.
"""
