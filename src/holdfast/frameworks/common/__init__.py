"""The code that all frameworks share.

The package has code for the protocol of an ``adapter``, for the user's own state, for trees of values and for NumPy
state. It also has a TCP process group, for frameworks whose own group cannot be rebuilt.
"""
