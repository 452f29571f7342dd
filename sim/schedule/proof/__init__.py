"""The proof-reader behind ``check``: plays a schedule on abstract contents, instead of numbers."""
