"""What work costs where: profiles, laws, calibration, and the live estimate that routes are chosen by.

Modules, from the bottom up; none does I/O but `catalog`, and only those that calibrate need SciPy:

* `profiles`, `catalog`, `hf_config`: accelerators and models, each figure with its source.
* `layout`, `kv`: how a model is spread over accelerators, and what its KV weighs there.
* `constants`: the few fitted constants, with where they come from; `prediction`: p50, p90 and that origin.
* `laws`, `memory`: prefill, decode step, transfer, and what fits.
* `meanfield`: a closed loop on one aggregated replica. `calibration`: constants from measurements.
* `online`, `speeds`: what the planner believes of each live worker, from its reports.
"""
