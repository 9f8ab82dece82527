"""Published results of disaggregated serving across accelerators, simulated: published / simulated / error.

* `data/published.yaml`: what was published, and where. `data/constants.yaml`: what was fitted to it, and to how much.
* `published`, `constants`: both files, checked. `cross_vendor`, `deepseek`: the two cases as scenarios.
* `claims`: each published statement beside its simulation. `report`: all of it; `as_json`: for machines.
"""
