"""The code that all frameworks share.

It holds the protocol of an ``adapter``, the user's own state, trees of values, NumPy state, and a TCP process group for
frameworks whose own group cannot be rebuilt.
"""
