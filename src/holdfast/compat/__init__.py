"""Replacements for other tools' packages: ``mindio_ttp`` and ``taskd``, opt-in. See docs/compat.md.

``holdfast compat install`` makes both importable for all scripts of this Python, ``import holdfast.compat.install`` for
one script.
"""
