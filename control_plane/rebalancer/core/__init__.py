"""Pure decisions of the ReBalancer: the model, the search, the order of moves, their pace."""
