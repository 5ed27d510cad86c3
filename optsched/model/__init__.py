"""The schedule format: disjunctive graph, documents, evaluation and the independent verifier."""
