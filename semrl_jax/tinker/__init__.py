"""Tinker's API: its SDK trains adapters upon one frozen model, and samples from them."""
