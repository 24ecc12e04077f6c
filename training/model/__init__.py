"""What a step works on: names, modes, number formats, hooks, forms of tensors, and the interface of policies."""
