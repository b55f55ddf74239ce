"""Training loops of other people: Hugging Face's ``Trainer`` and Lightning, each behind one line."""
