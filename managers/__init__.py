"""Management layer: tokenise, schedule, detokenise; each role a process that knows the others only by message."""
