"""The command ``holdfast``.

``main`` imports a module of ``commands`` when its command is used. ``start`` makes the settings of a run from flags,
files and the environment of a scheduler, and starts the run. ``screen`` makes the output for people: views of a run,
reports, tables, escaping.
"""
