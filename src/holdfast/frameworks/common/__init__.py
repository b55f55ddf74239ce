"""What frameworks share: the protocol of an ``adapter``, user state, trees of values, NumPy state, and a TCP process
group for frameworks whose own cannot be rebuilt."""
