"""Checkpoints: `Grid.save` and `Grid.load` beside plain writes and reads of the same bytes."""
