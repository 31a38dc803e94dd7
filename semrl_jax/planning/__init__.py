"""What a run would need and how fast it would be on a TPU slice, from programs compiled here."""
