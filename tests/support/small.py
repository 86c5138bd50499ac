"""The head of a run file for tests of whole commands: a graph and a network so small that a round takes no time."""

SMALL = """
[data]
name = "synthetic"
num_nodes = 60
average_degree = 4.0
num_features = 9
num_classes = 3
split = [0.4, 0.3, 0.3]
[model]
backbone = "gcn"
num_layers = 2
hidden = 8
"""
