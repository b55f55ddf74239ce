"""The command ``holdfast``.

``main`` loads one command of ``commands`` when it is used. ``start`` turns flags, files and schedulers into the
settings of a run and starts it. ``screen`` makes the output for people: views of a run, reports, tables, escaping.
"""
