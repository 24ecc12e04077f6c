"""The user's model as it is: names, modes, number formats, hooks, split tensors."""
