"""`pipe why`: evidence from the reports of a run, the rules that name causes, and the verdict."""
