"""What one worker decides without I/O, shared by the session and the simulator: so far, where its script is."""
