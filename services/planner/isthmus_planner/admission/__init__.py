"""Who may go now, who waits in line and for how long, and who is told at once to come back later."""
