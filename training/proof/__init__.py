"""The proof that a resumed run continues bit for bit."""
