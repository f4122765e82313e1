"""Other servers beside Tercet: their models, how they are started, how they are watched."""
