"""Loading: ``validation`` judges a directory, ``load_plan`` says which extents are read, ``load`` reads and verifies
them."""
