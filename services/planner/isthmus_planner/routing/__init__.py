"""The choice of a route, by predicted latency: filters → scorers → picker, all pure (docs/routing.md).

`view.View` is what the planner knows, kept up to date beat by beat; `choose.choose` decides out of it; `view.commit`
books what was decided. `explain` tells afterwards what was weighed.
"""
