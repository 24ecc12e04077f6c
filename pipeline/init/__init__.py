"""`pipe init`: the files of a new project."""
