"""How far apart tensors and models are: metrics, the comparison graph, what may differ and by how much."""
